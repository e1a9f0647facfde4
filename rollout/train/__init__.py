"""The main job: tasks, episodes, verdicts, frames, learner, weights, in one supervised run."""
