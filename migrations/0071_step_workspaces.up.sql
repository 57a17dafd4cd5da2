-- A step of a workspace is an operation of the kind step_workspace. It has one action, in a workspace that it did not fork.
ALTER TABLE step_actions DROP CONSTRAINT step_actions_made_check;
ALTER TABLE step_actions ADD CONSTRAINT step_actions_made_check CHECK (phase IN ('pending', 'ended') OR workspace_id IS NOT NULL);
CREATE INDEX operations_workspace_steps_idx ON operations (project_id) WHERE kind = 'step_workspace' AND state IN ('pending', 'running');
