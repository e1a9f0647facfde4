"""What every sandbox must do, whichever jail, user and cgroup layout of the host: one suite for all of them.

Invariant: nothing is skipped because a limit is not enforced; then the test asserts that this is reported, and what
holds instead. `arena.Arena.hostile` surrounds hostile programs with the checks of containment: the engine is healthy,
a sibling is unaffected, the result is classified, nothing is left. The quick form runs with all tests; the long form,
with the numbers below, is `scripts/soak conformance`.

C: complaints about other sandboxes, found in their trackers. P: probes.

    C1   a timed-out command's processes live on         test_reasons.test_a_timed_out_command_leaves_no_process
    C3   a background child holds the pipe and the call  test_processes.test_a_background_child_holds_nobody_up_and_lives_on
    C5   one stuck start freezes a hundred others        test_load.test_one_stuck_start_and_a_hundred_others
    C7   a flood of output fills the host's memory       test_output.test_a_flood_is_cut_at_its_limit_and_the_engine_stays_small
    C9   a very long diff hangs the reader               test_output.test_200_mb_of_output_end_and_every_byte_is_counted
    C11  a character split over writes ends the session  test_output.test_a_character_split_over_writes_arrives_whole_and_the_session_lives
    C13  1,000 killed supervisors leave cgroups          test_engines.test_a_killed_supervisor_takes_its_sandbox_along_and_leaves_no_cgroup
    C15  the end of a thread ends the sandbox            test_threads.test_a_sandbox_outlives_the_thread_that_started_it
    C17  10,000 orphans become zombies                   test_processes.test_orphans_are_reaped_by_the_thousand
    C19  an engine that dies is not cleaned up           test_engines.test_when_one_of_three_engines_dies_the_next_reclaims_only_what_it_held
    C21  running out of memory kills the session too     test_reasons.test_an_oom_kills_the_hog_and_the_session_lives
    C23  counters of one command pollute the next        test_usage.test_the_second_command_is_not_charged_with_the_firsts_oom_cpu_or_peak
    C25  the disk quota is silently off                  test_reasons.test_a_full_disk_is_named_and_seen_inside_as_no_space
    C27  a plain container fails obscurely               test_hosts.test_a_host_without_cgroups_isolates_and_names_what_it_cannot_limit
    C29  a forbidden clone3 breaks threads               test_threads.test_threads_pools_servers_and_name_look_ups_work_inside
    C31  the host follows a link on read-out             test_files.test_a_link_is_refused_on_the_way_out_and_in
    C33  50 parallel commands spoil one workspace        test_siblings.test_parallel_commands_in_one_workspace_leave_one_consistent_tree
    C35  2,000 requests at a cap of 64 time out          test_load.test_requests_over_the_cap_queue_and_none_fails
    C36  networks run out at thirty-one                  test_load.test_forty_private_networks_live_at_once_and_each_has_its_port
    C37  a program just written cannot be executed       test_load.test_a_program_runs_the_moment_it_was_written
    P1   the classic fork bomb                           test_bombs.test_the_classic_fork_bomb_meets_its_limit
    P3   100 GB of memory                                test_reasons.test_a_hog_that_asks_for_more_than_the_machine_has_is_refused_or_killed
    P5   dd without end                                  test_bombs.test_a_disk_filler_meets_its_quota_in_bytes_and_inodes
    P7   a sparse file of an exbibyte                    test_files.test_a_huge_sparse_file_is_refused_by_its_size
    P11  setsid and a background child                   test_processes.test_a_session_of_its_own_is_gone_when_the_sandbox_closes
    P13  kill -9 -1 and kill -9 1                        test_processes.test_a_kill_of_everything_ends_at_most_the_session
    P15  descriptors that leaked in                      test_processes.test_only_the_standard_descriptors_are_open
    P17  a link to the root, read from outside           test_files.test_a_path_through_the_root_is_the_sandboxs_own
    P19  a directory swapped for a link during uploads   test_files.test_a_directory_swapped_for_a_link_during_uploads_never_leads_outside
    P21  a cgroup of its own making                      test_files.test_cgroups_and_the_kernels_settings_are_absent_or_read_only
    P25  abstract sockets and vsock to a sibling         test_siblings.test_sockets_of_a_sibling_are_not_there_and_other_families_are_refused
    P27  a lock on the image's file signals a sibling    test_siblings.test_a_lock_on_a_file_of_the_image_is_the_sandboxs_own
    P29  all watches taken                               test_siblings.test_a_sibling_can_watch_although_all_watches_are_taken_or_is_told_that_it_shares

The eight reasons are told apart in `test_reasons`; what a harness expects of any provider is `test_provider`.
"""  # noqa: E501
