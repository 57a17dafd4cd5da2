-- The actions of steps. A step is an operation of the kind step_checkpoint. These rows say how far each of its actions has come, and what
-- they have made, so that another controller can continue the step.
CREATE TABLE step_actions (
    operation_id  text COLLATE "C" NOT NULL CONSTRAINT step_actions_operation_fk REFERENCES operations (id) DEFERRABLE INITIALLY DEFERRED, -- it is inserted last
    project_id    text COLLATE "C" NOT NULL CONSTRAINT step_actions_project_fk REFERENCES projects (id),
    index         integer NOT NULL,                -- position in the request
    phase         text NOT NULL DEFAULT 'pending',
    request       bytea,                           -- JSON; null when the action has ended
    fork_id       text COLLATE "C",                -- the operation that forks the workspace
    workspace_id  text COLLATE "C",
    checkpoint_id text COLLATE "C",
    result        bytea,                           -- JSON
    ended_at      timestamptz,
    CONSTRAINT step_actions_pkey PRIMARY KEY (operation_id, index),
    CONSTRAINT step_actions_phase_check CHECK (phase IN ('pending', 'forking', 'running', 'capturing', 'ended')),
    CONSTRAINT step_actions_ended_check CHECK ((phase = 'ended') = (ended_at IS NOT NULL) AND (phase = 'ended') = (request IS NULL) AND (phase <> 'ended' OR result IS NOT NULL)),
    CONSTRAINT step_actions_made_check CHECK (phase IN ('pending', 'ended') OR (fork_id IS NOT NULL AND workspace_id IS NOT NULL))
);
CREATE INDEX step_actions_first_idx ON step_actions (project_id, operation_id DESC) WHERE index = 0;
GRANT SELECT, INSERT, UPDATE, DELETE ON step_actions TO coppice_app;
ALTER TABLE step_actions ENABLE ROW LEVEL SECURITY;
ALTER TABLE step_actions FORCE ROW LEVEL SECURITY;
CREATE POLICY step_actions_tenant ON step_actions
    USING (project_id = (SELECT current_setting('coppice.project_id', true)) OR (SELECT current_setting('coppice.project_id', true)) = 'system')
    WITH CHECK (project_id = (SELECT current_setting('coppice.project_id', true)) OR (SELECT current_setting('coppice.project_id', true)) = 'system');
CREATE INDEX operations_steps_idx ON operations (project_id) WHERE kind = 'step_checkpoint' AND state IN ('pending', 'running');
