"""Where each of the 39 traps of the reference (spec of PPO, 1.13) is tested; this test keeps the list true."""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
TRAPS = {
    1: "intake/test_registry.py::test_every_agent_gets_a_learner_of_its_own_from_the_factory",
    2: "intake/test_registry.py::test_a_policy_whose_data_are_all_stale_is_skipped_and_can_go_on",
    3: "intake/test_registry.py::test_a_policy_whose_data_are_all_stale_is_skipped_and_can_go_on",
    4: "intake/test_registry.py::test_each_policy_goes_at_its_own_pace",
    5: "learning/test_ppo_update.py::test_a_stack_learns_what_its_policies_would_alone",
    6: "loops/test_independent.py::test_exports_say_what_the_policies_say",
    7: "intake/test_paths.py::test_environments_and_agents_are_never_glued_together",
    8: "loops/test_independent.py::test_agents_of_all_kinds_learn_side_by_side",
    9: "learning/test_ppo_update.py::test_the_behaviours_own_log_probs_are_what_ratios_are_taken_against",
    10: "intake/test_registry.py::test_the_five_answers_differ_and_are_counted",
    11: "learning/test_ppo_update.py::test_values_are_denormalised_before_credit",
    12: "learning/test_ppo_update.py::test_values_are_denormalised_before_credit",
    13: "learning/test_ppo_update.py::test_divergence_is_that_of_the_whole_pass_and_stops_before_the_step",
    14: "learning/test_ppo_maths.py::test_statistics_stay_right_beyond_2_to_the_24",
    15: "learning/test_ppo_update.py::test_an_update_is_stable_baselines3s",
    16: "learning/test_ppo_maths.py::test_truncation_bootstraps_from_the_successor_and_leaks_nothing",
    17: "intake/test_paths.py::test_a_cut_takes_the_next_observation_as_successor",
    18: "learning/test_ppo_update.py::test_an_update_is_stable_baselines3s",  # values are the learner's own
    19: "policies/test_small_policies.py::test_masked_choices_are_torchs_on_the_reduced_set",
    20: "policies/test_small_policies.py::test_gaussian_and_squashed_are_torchs",
    21: "loops/test_independent.py::test_exports_say_what_the_policies_say",
    22: "learning/test_ppo_update.py::test_order_of_steps_is_new_for_every_pass_and_policy",
    23: "learning/test_ppo_maths.py::test_normalized_advantages",
    24: "intake/test_paths.py::test_what_does_not_fit_is_named",
    25: "intake/test_recorder.py::test_every_lane_is_what_happened_in_it",
    26: "intake/test_paths.py::test_what_does_not_fit_is_named",
    27: "intake/test_paths.py::test_what_does_not_fit_is_named",
    28: "intake/test_registry.py::test_age_is_judged_when_data_are_consumed",
    29: "intake/test_registry.py::test_the_five_answers_differ_and_are_counted",
    30: "intake/test_codec.py::test_parquet_loses_nothing",
    31: "intake/test_codec.py::test_every_flipped_byte_is_found",
    32: "loops/test_independent.py::test_resuming_is_never_having_stopped",
    33: "learning/test_ppo_update.py::test_statistics_change_between_updates_only",
    34: "intake/test_registry.py::test_readiness_does_not_fire_again_while_a_policy_trains",
    35: "learning/test_ppo_update.py::test_an_error_in_the_middle_leaves_the_learner_as_it_was",
    36: "envs/test_agent_envs.py::test_an_environment_comes_back_to_where_it_was",
    37: "loops/test_independent.py::test_an_export_that_says_something_else_is_not_kept",
    38: "intake/test_paths.py::test_memory_grows_with_what_is_there_not_with_the_limit",
    39: "loops/test_independent.py::test_it_learns_what_is_to_be_learned",
}


@pytest.mark.parametrize("trap", range(1, 40))
def test_every_trap_has_its_test(trap: int) -> None:
    file, _, name = TRAPS[trap].partition("::")
    assert f"def {name}(" in (TESTS / file).read_text()
