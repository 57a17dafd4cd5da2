DROP INDEX operations_workspace_steps_idx;
DELETE FROM step_actions WHERE phase NOT IN ('pending', 'ended') AND fork_id IS NULL;
ALTER TABLE step_actions DROP CONSTRAINT step_actions_made_check;
ALTER TABLE step_actions ADD CONSTRAINT step_actions_made_check CHECK (phase IN ('pending', 'ended') OR (fork_id IS NOT NULL AND workspace_id IS NOT NULL));
