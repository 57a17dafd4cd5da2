DROP INDEX operations_steps_idx;
DROP TABLE step_actions;
