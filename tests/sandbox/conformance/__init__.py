"""What every sandbox must do, whichever jail, user and cgroup layout: one suite for all of them."""
