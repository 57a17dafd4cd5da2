-- The controller's schema. Rules that hold everywhere:
--   * every table has project_id, row-level security is enabled and forced, and the controller works as coppice_app,
--     which is neither owner nor superuser: a query without a WHERE sees one project, a connection without a scope
--     sees nothing. The scope is the transaction-local setting coppice.project_id; 'system' is the controller's own
--     work (the operations loop, heartbeats, authentication).
--   * what the operator publishes (templates, images) belongs to the system project and is readable by all (shared).
--   * states change only along core's transition tables: the triggers below repeat them and a test compares the two.
--   * ids and names compare bytewise (COLLATE "C"), so that ids sort by age whatever the cluster's locale is.
--   * constraints have names, because errors are mapped by them.

-- Roles belong to the whole cluster, so another database may have made it, perhaps at this moment.
DO $$
BEGIN
    CREATE ROLE coppice_app NOLOGIN NOSUPERUSER NOBYPASSRLS NOCREATEDB NOCREATEROLE NOINHERIT;
EXCEPTION
    WHEN duplicate_object OR unique_violation THEN NULL;
END
$$;

-- The login role works by SET ROLE; a superuser may do so anyway.
DO $$
BEGIN
    IF NOT pg_has_role(current_user, 'coppice_app', 'MEMBER') THEN
        EXECUTE format('GRANT coppice_app TO %I', current_user);
    END IF;
END
$$;

CREATE TABLE projects (
    id         text COLLATE "C" CONSTRAINT projects_pkey PRIMARY KEY,
    project_id text COLLATE "C" NOT NULL GENERATED ALWAYS AS (id) STORED,
    name       text COLLATE "C" NOT NULL CONSTRAINT projects_name_key UNIQUE,
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT projects_name_check CHECK (name ~ '^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$')
);

-- The operator's own project: templates, published images, runners.
INSERT INTO projects (id, name) VALUES ('prj_00000000000000000000000000', 'system');

CREATE TABLE api_keys (
    id         text COLLATE "C" CONSTRAINT api_keys_pkey PRIMARY KEY,
    project_id text COLLATE "C" NOT NULL CONSTRAINT api_keys_project_fk REFERENCES projects (id),
    name       text NOT NULL,
    prefix     text NOT NULL, -- the start of the secret, for people and secret scanners
    hash       bytea NOT NULL CONSTRAINT api_keys_hash_key UNIQUE,
    scopes     text[] NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    expires_at timestamptz,
    revoked_at timestamptz,
    CONSTRAINT api_keys_hash_check CHECK (octet_length(hash) = 32)
);

CREATE TABLE runners (
    id               text COLLATE "C" CONSTRAINT runners_pkey PRIMARY KEY,
    project_id       text COLLATE "C" NOT NULL DEFAULT 'prj_00000000000000000000000000' CONSTRAINT runners_project_fk REFERENCES projects (id),
    hostname         text NOT NULL,
    endpoint         text NOT NULL,
    version          integer NOT NULL,
    class            jsonb NOT NULL,
    class_key        text COLLATE "C" NOT NULL,
    capacity         jsonb NOT NULL,
    allocated        jsonb NOT NULL, -- as the runner last said
    kvm              text NOT NULL,
    disk_free_mb     bigint NOT NULL,
    draining         boolean NOT NULL DEFAULT false,
    lease_epoch      bigint NOT NULL,
    lease_expires_at timestamptz NOT NULL,
    started_at       timestamptz NOT NULL, -- by the runner's clock; for people
    registered_at    timestamptz NOT NULL DEFAULT now(),
    heartbeat_at     timestamptz NOT NULL DEFAULT now(), -- when the controller last answered one
    fenced_at        timestamptz, -- set when its workspaces were given up; cleared by a registration
    CONSTRAINT runners_lease_epoch_check CHECK (lease_epoch >= 1)
);

CREATE TABLE images (
    id         text COLLATE "C" CONSTRAINT images_pkey PRIMARY KEY,
    project_id text COLLATE "C" NOT NULL CONSTRAINT images_project_fk REFERENCES projects (id),
    digest     text COLLATE "C" NOT NULL,
    shared     boolean NOT NULL DEFAULT false,
    size_bytes bigint NOT NULL,
    built_at   timestamptz NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT images_project_digest_key UNIQUE (project_id, digest),
    CONSTRAINT images_project_id_key UNIQUE (project_id, id),
    CONSTRAINT images_digest_check CHECK (digest ~ '^sha256:[0-9a-f]{64}$')
);

-- Which runner has which image, and under which names. Names move when an image is rebuilt.
CREATE TABLE image_locations (
    project_id text COLLATE "C" NOT NULL,
    image_id   text COLLATE "C" NOT NULL,
    runner_id  text COLLATE "C" NOT NULL CONSTRAINT image_locations_runner_fk REFERENCES runners (id) ON DELETE CASCADE,
    name       text COLLATE "C" NOT NULL,
    shared     boolean NOT NULL DEFAULT false,
    CONSTRAINT image_locations_pkey PRIMARY KEY (runner_id, image_id, name),
    CONSTRAINT image_locations_image_fk FOREIGN KEY (project_id, image_id) REFERENCES images (project_id, id) ON DELETE CASCADE
);
CREATE INDEX image_locations_image_idx ON image_locations (image_id);
CREATE INDEX image_locations_name_idx ON image_locations (name);

CREATE TABLE operations (
    id               text COLLATE "C" CONSTRAINT operations_pkey PRIMARY KEY,
    project_id       text COLLATE "C" NOT NULL CONSTRAINT operations_project_fk REFERENCES projects (id),
    kind             text NOT NULL,
    state            text NOT NULL,
    step             text NOT NULL DEFAULT '', -- the named step to resume at; '' is the first
    input            jsonb NOT NULL,
    result           jsonb,
    problem_category text,
    problem_code     text,
    problem_message  text,
    timings          jsonb NOT NULL DEFAULT '[]',
    workspace_id     text COLLATE "C",
    checkpoint_id    text COLLATE "C",
    request_id       text NOT NULL DEFAULT '',
    lease_owner      text,
    lease_epoch      bigint NOT NULL DEFAULT 0, -- grows with every claim; a finished write of an old claim changes nothing
    lease_expires_at timestamptz,
    created_at       timestamptz NOT NULL DEFAULT now(),
    started_at       timestamptz,
    ended_at         timestamptz,
    CONSTRAINT operations_state_check CHECK (state IN ('pending', 'running', 'succeeded', 'failed')),
    CONSTRAINT operations_kind_check CHECK (kind ~ '^[a-z]+(_[a-z]+)*$'),
    CONSTRAINT operations_running_check CHECK (state <> 'running' OR (lease_owner IS NOT NULL AND lease_expires_at IS NOT NULL AND started_at IS NOT NULL AND lease_epoch >= 1)),
    CONSTRAINT operations_ended_check CHECK ((state IN ('succeeded', 'failed')) = (ended_at IS NOT NULL)),
    CONSTRAINT operations_succeeded_check CHECK (state <> 'succeeded' OR result IS NOT NULL),
    CONSTRAINT operations_failed_check CHECK ((state = 'failed') = (problem_code IS NOT NULL AND problem_category IS NOT NULL AND problem_message IS NOT NULL))
);
CREATE INDEX operations_unfinished_idx ON operations (lease_expires_at NULLS FIRST) WHERE state IN ('pending', 'running');
CREATE INDEX operations_checkpoint_idx ON operations (checkpoint_id) WHERE state IN ('pending', 'running');
CREATE INDEX operations_project_idx ON operations (project_id, id);
CREATE INDEX operations_workspace_idx ON operations (workspace_id) WHERE workspace_id IS NOT NULL;

CREATE TABLE workspaces (
    id                    text COLLATE "C" CONSTRAINT workspaces_pkey PRIMARY KEY,
    project_id            text COLLATE "C" NOT NULL CONSTRAINT workspaces_project_fk REFERENCES projects (id),
    name                  text COLLATE "C" NOT NULL,
    state                 text NOT NULL,
    epoch                 bigint NOT NULL DEFAULT 1, -- grows with every restore in place
    version               bigint NOT NULL DEFAULT 1, -- of labels and expiry, for compare-and-set
    image_name            text NOT NULL,
    image_digest          text COLLATE "C" NOT NULL,
    vcpus                 integer NOT NULL,
    memory_mib            integer NOT NULL,
    disk_gib              integer NOT NULL,
    egress_policy         text NOT NULL,
    env                   jsonb NOT NULL DEFAULT '{}',
    labels                jsonb NOT NULL DEFAULT '{}',
    parent_project_id     text COLLATE "C", -- the checkpoint that it was made from ...
    parent_checkpoint_id  text COLLATE "C",
    checkpoint_project_id text COLLATE "C", -- ... and the one that its sandbox last was forked from, restored to or captured as
    checkpoint_id         text COLLATE "C",
    sandbox_id            text COLLATE "C",
    failure_code          text,
    failure_message       text,
    created_at            timestamptz NOT NULL DEFAULT now(),
    ready_at              timestamptz, -- since when the present sandbox has been ready
    expires_at            timestamptz,
    ended_at              timestamptz,
    CONSTRAINT workspaces_project_id_key UNIQUE (project_id, id),
    CONSTRAINT workspaces_state_check CHECK (state IN ('creating', 'restoring', 'quarantined', 'ready', 'checkpointing', 'suspended', 'terminating', 'terminated', 'failed', 'lost')),
    CONSTRAINT workspaces_name_check CHECK (name ~ '^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$'),
    CONSTRAINT workspaces_epoch_check CHECK (epoch >= 1 AND version >= 1),
    CONSTRAINT workspaces_resources_check CHECK (vcpus BETWEEN 1 AND 64 AND memory_mib BETWEEN 128 AND 262144 AND memory_mib % 2 = 0 AND disk_gib BETWEEN 1 AND 1024),
    CONSTRAINT workspaces_egress_policy_check CHECK (egress_policy IN ('deny-all', 'allow-all')),
    CONSTRAINT workspaces_image_digest_check CHECK (image_digest ~ '^sha256:[0-9a-f]{64}$'),
    CONSTRAINT workspaces_running_check CHECK (state NOT IN ('ready', 'checkpointing') OR (sandbox_id IS NOT NULL AND checkpoint_id IS NOT NULL AND ready_at IS NOT NULL)),
    CONSTRAINT workspaces_suspended_check CHECK (state <> 'suspended' OR (sandbox_id IS NULL AND checkpoint_id IS NOT NULL)),
    CONSTRAINT workspaces_ended_check CHECK ((state IN ('terminated', 'failed', 'lost')) = (ended_at IS NOT NULL)),
    CONSTRAINT workspaces_failure_check CHECK (state NOT IN ('failed', 'lost') OR (failure_code IS NOT NULL AND failure_message IS NOT NULL)),
    CONSTRAINT workspaces_parent_project_check CHECK ((parent_checkpoint_id IS NULL) = (parent_project_id IS NULL) AND parent_project_id IN (project_id, 'prj_00000000000000000000000000')),
    CONSTRAINT workspaces_checkpoint_project_check CHECK ((checkpoint_id IS NULL) = (checkpoint_project_id IS NULL) AND checkpoint_project_id IN (project_id, 'prj_00000000000000000000000000'))
);
CREATE UNIQUE INDEX workspaces_live_name_key ON workspaces (project_id, name) WHERE state NOT IN ('terminated', 'failed', 'lost');
CREATE INDEX workspaces_parent_idx ON workspaces (parent_checkpoint_id);
CREATE INDEX workspaces_checkpoint_idx ON workspaces (checkpoint_id);
CREATE INDEX workspaces_terminating_idx ON workspaces (id) WHERE state = 'terminating';
CREATE INDEX workspaces_expiry_idx ON workspaces (expires_at) WHERE expires_at IS NOT NULL AND ended_at IS NULL;

-- One row per VM instance: its place and its identity, which no other living instance shares. A restore in place has two
-- for a while. The row exists before the runner is called, so a sandbox without a living row is garbage.
CREATE TABLE sandboxes (
    id           text COLLATE "C" CONSTRAINT sandboxes_pkey PRIMARY KEY,
    project_id   text COLLATE "C" NOT NULL,
    workspace_id text COLLATE "C" NOT NULL,
    epoch        bigint NOT NULL,
    runner_id    text COLLATE "C" NOT NULL CONSTRAINT sandboxes_runner_fk REFERENCES runners (id),
    vcpus        integer NOT NULL,
    memory_mib   integer NOT NULL,
    generation   text NOT NULL CONSTRAINT sandboxes_generation_key UNIQUE, -- never used twice, not even by a dead one
    hostname     text COLLATE "C" NOT NULL,
    machine_id   text COLLATE "C" NOT NULL,
    mac          text COLLATE "C" NOT NULL,
    ip           text COLLATE "C" NOT NULL,
    created_at   timestamptz NOT NULL DEFAULT now(),
    ended_at     timestamptz,
    CONSTRAINT sandboxes_project_id_key UNIQUE (project_id, id),
    CONSTRAINT sandboxes_workspace_fk FOREIGN KEY (project_id, workspace_id) REFERENCES workspaces (project_id, id),
    CONSTRAINT sandboxes_epoch_check CHECK (epoch >= 1),
    CONSTRAINT sandboxes_hostname_check CHECK (hostname ~ '^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$'),
    CONSTRAINT sandboxes_machine_id_check CHECK (machine_id ~ '^[0-9a-f]{32}$'),
    CONSTRAINT sandboxes_mac_check CHECK (mac ~ '^[0-9a-f][26ae](:[0-9a-f]{2}){5}$'), -- locally administered, unicast
    CONSTRAINT sandboxes_ip_check CHECK (ip ~ '^[0-9]{1,3}([.][0-9]{1,3}){3}$')
);
CREATE UNIQUE INDEX sandboxes_live_ip_key ON sandboxes (ip) WHERE ended_at IS NULL;
CREATE UNIQUE INDEX sandboxes_live_mac_key ON sandboxes (mac) WHERE ended_at IS NULL;
CREATE UNIQUE INDEX sandboxes_live_machine_id_key ON sandboxes (machine_id) WHERE ended_at IS NULL;
CREATE UNIQUE INDEX sandboxes_live_hostname_key ON sandboxes (project_id, hostname) WHERE ended_at IS NULL;
CREATE UNIQUE INDEX sandboxes_live_epoch_key ON sandboxes (workspace_id, epoch) WHERE ended_at IS NULL;
CREATE INDEX sandboxes_live_runner_idx ON sandboxes (runner_id) INCLUDE (vcpus, memory_mib) WHERE ended_at IS NULL;

ALTER TABLE workspaces ADD CONSTRAINT workspaces_sandbox_fk FOREIGN KEY (project_id, sandbox_id) REFERENCES sandboxes (project_id, id) DEFERRABLE INITIALLY DEFERRED;

CREATE TABLE checkpoints (
    id                 text COLLATE "C" CONSTRAINT checkpoints_pkey PRIMARY KEY,
    project_id         text COLLATE "C" NOT NULL CONSTRAINT checkpoints_project_fk REFERENCES projects (id),
    kind               text NOT NULL,
    state              text NOT NULL,
    shared             boolean NOT NULL DEFAULT false,
    parent_project_id  text COLLATE "C",
    parent_id          text COLLATE "C",
    root_id            text COLLATE "C" NOT NULL, -- the template that this tree grew from
    depth              integer NOT NULL,
    workspace_id       text COLLATE "C", -- captured from
    workspace_epoch    bigint,
    name               text COLLATE "C",
    labels             jsonb NOT NULL DEFAULT '{}',
    annotations        jsonb NOT NULL DEFAULT '{}',
    version            bigint NOT NULL DEFAULT 1, -- of name, labels and annotations, for compare-and-set
    image_name         text NOT NULL,
    image_digest       text COLLATE "C" NOT NULL,
    vcpus              integer NOT NULL,
    memory_mib         integer NOT NULL,
    disk_gib           integer NOT NULL,
    runner_id          text COLLATE "C" CONSTRAINT checkpoints_runner_fk REFERENCES runners (id),
    runner_class       jsonb,
    class_key          text COLLATE "C",
    base_id            text COLLATE "C",
    delta_bytes        bigint NOT NULL DEFAULT 0,
    device_state_bytes bigint NOT NULL DEFAULT 0,
    disk_bytes         bigint NOT NULL DEFAULT 0,
    pause_ms           double precision NOT NULL DEFAULT 0,
    timings            jsonb NOT NULL DEFAULT '[]',
    parent_reseal      jsonb NOT NULL DEFAULT '[]',
    stale_processes    jsonb NOT NULL DEFAULT '[]',
    pruned             boolean NOT NULL DEFAULT false, -- deleted and no longer anybody's ancestor: not shown any more
    operation_id       text COLLATE "C", -- the operation that made it
    failure_code       text,
    failure_message    text,
    created_at         timestamptz NOT NULL DEFAULT now(),
    captured_at        timestamptz,
    ended_at           timestamptz,
    CONSTRAINT checkpoints_project_id_key UNIQUE (project_id, id),
    CONSTRAINT checkpoints_kind_check CHECK (kind IN ('template', 'user')),
    CONSTRAINT checkpoints_state_check CHECK (state IN ('capturing', 'captured', 'sealed', 'failed', 'deleted')),
    CONSTRAINT checkpoints_name_check CHECK (name ~ '^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$'),
    CONSTRAINT checkpoints_version_check CHECK (version >= 1),
    CONSTRAINT checkpoints_parent_check CHECK (parent_id <> id),
    CONSTRAINT checkpoints_root_check CHECK ((parent_id IS NULL) = (depth = 0) AND (parent_id IS NULL) = (root_id = id)),
    CONSTRAINT checkpoints_template_check CHECK (kind <> 'template' OR (parent_id IS NULL AND workspace_id IS NULL AND runner_id IS NOT NULL AND class_key IS NOT NULL)),
    CONSTRAINT checkpoints_user_check CHECK (kind <> 'user' OR (parent_id IS NOT NULL AND workspace_id IS NOT NULL AND workspace_epoch IS NOT NULL)),
    CONSTRAINT checkpoints_captured_check CHECK (state NOT IN ('captured', 'sealed') OR (captured_at IS NOT NULL AND runner_id IS NOT NULL AND runner_class IS NOT NULL AND class_key IS NOT NULL AND base_id IS NOT NULL)),
    CONSTRAINT checkpoints_ended_check CHECK ((state IN ('failed', 'deleted')) = (ended_at IS NOT NULL)),
    CONSTRAINT checkpoints_failure_check CHECK (state <> 'failed' OR (failure_code IS NOT NULL AND failure_message IS NOT NULL)),
    CONSTRAINT checkpoints_pruned_check CHECK (NOT pruned OR state = 'deleted'),
    CONSTRAINT checkpoints_annotations_check CHECK (octet_length(annotations::text) <= 65536),
    CONSTRAINT checkpoints_parent_project_check CHECK ((parent_id IS NULL) = (parent_project_id IS NULL) AND parent_project_id IN (project_id, 'prj_00000000000000000000000000')),
    CONSTRAINT checkpoints_parent_fk FOREIGN KEY (parent_project_id, parent_id) REFERENCES checkpoints (project_id, id),
    CONSTRAINT checkpoints_workspace_fk FOREIGN KEY (project_id, workspace_id) REFERENCES workspaces (project_id, id)
);
-- One template per image, shape, class and runner: its bytes are on that runner only. Concurrent creators meet here.
CREATE UNIQUE INDEX checkpoints_template_key ON checkpoints (runner_id, image_digest, class_key, vcpus, memory_mib) WHERE kind = 'template' AND state IN ('capturing', 'captured', 'sealed');
CREATE UNIQUE INDEX checkpoints_live_name_key ON checkpoints (project_id, name) WHERE name IS NOT NULL AND state NOT IN ('failed', 'deleted');
CREATE INDEX checkpoints_parent_idx ON checkpoints (parent_id, id);
CREATE INDEX checkpoints_tree_idx ON checkpoints (project_id, root_id, depth, id);
CREATE INDEX checkpoints_list_idx ON checkpoints (project_id, id);
CREATE INDEX checkpoints_workspace_idx ON checkpoints (workspace_id, id);
CREATE INDEX checkpoints_runner_idx ON checkpoints (runner_id) WHERE state IN ('capturing', 'captured', 'sealed');

ALTER TABLE workspaces ADD CONSTRAINT workspaces_parent_fk FOREIGN KEY (parent_project_id, parent_checkpoint_id) REFERENCES checkpoints (project_id, id);
ALTER TABLE workspaces ADD CONSTRAINT workspaces_checkpoint_fk FOREIGN KEY (checkpoint_project_id, checkpoint_id) REFERENCES checkpoints (project_id, id);

-- What each fork got new, for ever. Partitions by month; coppice_make_partitions makes them ahead.
CREATE TABLE reseal_reports (
    project_id      text COLLATE "C" NOT NULL CONSTRAINT reseal_reports_project_fk REFERENCES projects (id),
    workspace_id    text COLLATE "C" NOT NULL,
    sandbox_id      text COLLATE "C" NOT NULL,
    operation_id    text COLLATE "C" NOT NULL,
    checkpoint_id   text COLLATE "C" NOT NULL,
    generation      text NOT NULL,
    complete        boolean NOT NULL,
    steps           jsonb NOT NULL,
    stale_processes jsonb NOT NULL,
    duration_ms     double precision NOT NULL,
    created_at      timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT reseal_reports_pkey PRIMARY KEY (sandbox_id, created_at)
) PARTITION BY RANGE (created_at);
CREATE INDEX reseal_reports_workspace_idx ON reseal_reports (workspace_id);

CREATE TABLE sessions (
    id           text COLLATE "C" CONSTRAINT sessions_pkey PRIMARY KEY,
    project_id   text COLLATE "C" NOT NULL,
    workspace_id text COLLATE "C" NOT NULL,
    sandbox_id   text COLLATE "C" NOT NULL, -- which fixes the epoch
    guest_id     text COLLATE "C" NOT NULL, -- the agent's name for it, which forks inherit
    created_at   timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT sessions_guest_key UNIQUE (sandbox_id, guest_id),
    CONSTRAINT sessions_project_id_key UNIQUE (project_id, id),
    CONSTRAINT sessions_sandbox_fk FOREIGN KEY (project_id, sandbox_id) REFERENCES sandboxes (project_id, id) ON DELETE CASCADE
);

CREATE TABLE attach_tokens (
    hash       bytea CONSTRAINT attach_tokens_pkey PRIMARY KEY,
    project_id text COLLATE "C" NOT NULL,
    session_id text COLLATE "C" NOT NULL,
    sandbox_id text COLLATE "C" NOT NULL, -- the session's sandbox when it was issued: dead after a restore
    created_at timestamptz NOT NULL DEFAULT now(),
    expires_at timestamptz NOT NULL,
    used_at    timestamptz,
    CONSTRAINT attach_tokens_hash_check CHECK (octet_length(hash) = 32),
    CONSTRAINT attach_tokens_session_fk FOREIGN KEY (project_id, session_id) REFERENCES sessions (project_id, id) ON DELETE CASCADE
);
CREATE INDEX attach_tokens_session_idx ON attach_tokens (session_id);
CREATE INDEX attach_tokens_expiry_idx ON attach_tokens (expires_at);

-- A forwarded port belongs to the workspace: a restore in place keeps it, a fork does not inherit it.
CREATE TABLE ports (
    id           text COLLATE "C" CONSTRAINT ports_pkey PRIMARY KEY,
    project_id   text COLLATE "C" NOT NULL,
    workspace_id text COLLATE "C" NOT NULL,
    guest_port   integer NOT NULL,
    listen       text NOT NULL,
    created_at   timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT ports_guest_port_check CHECK (guest_port BETWEEN 1 AND 65535),
    CONSTRAINT ports_workspace_fk FOREIGN KEY (project_id, workspace_id) REFERENCES workspaces (project_id, id)
);
CREATE INDEX ports_workspace_idx ON ports (workspace_id, id);

-- The state machines. core has the same tables; controller/postgres tests every pair against these functions.
CREATE FUNCTION coppice_workspace_transition() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        IF NEW.state NOT IN ('creating', 'restoring') THEN
            RAISE EXCEPTION 'a workspace cannot begin as %', NEW.state USING ERRCODE = 'check_violation', CONSTRAINT = 'workspaces_transition_check';
        END IF;
        RETURN NEW;
    END IF;
    IF (OLD.state, NEW.state) IN (
        ('creating', 'restoring'), ('creating', 'terminating'), ('creating', 'failed'), ('creating', 'lost'),
        ('restoring', 'quarantined'), ('restoring', 'ready'), ('restoring', 'terminating'), ('restoring', 'failed'), ('restoring', 'lost'),
        ('quarantined', 'ready'), ('quarantined', 'terminating'), ('quarantined', 'failed'), ('quarantined', 'lost'),
        ('ready', 'checkpointing'), ('ready', 'restoring'), ('ready', 'suspended'), ('ready', 'terminating'), ('ready', 'lost'),
        ('checkpointing', 'ready'), ('checkpointing', 'suspended'), ('checkpointing', 'terminating'), ('checkpointing', 'lost'),
        ('suspended', 'restoring'), ('suspended', 'terminating'),
        ('terminating', 'terminated'), ('failed', 'terminated'), ('lost', 'terminated')
    ) THEN
        RETURN NEW;
    END IF;
    RAISE EXCEPTION 'workspace % cannot go from % to %', OLD.id, OLD.state, NEW.state USING ERRCODE = 'check_violation', CONSTRAINT = 'workspaces_transition_check';
END
$$;
CREATE TRIGGER workspaces_begin BEFORE INSERT ON workspaces FOR EACH ROW EXECUTE FUNCTION coppice_workspace_transition();
CREATE TRIGGER workspaces_transition BEFORE UPDATE ON workspaces FOR EACH ROW WHEN (OLD.state IS DISTINCT FROM NEW.state) EXECUTE FUNCTION coppice_workspace_transition();

CREATE FUNCTION coppice_checkpoint_transition() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        IF NEW.state <> 'capturing' THEN
            RAISE EXCEPTION 'a checkpoint cannot begin as %', NEW.state USING ERRCODE = 'check_violation', CONSTRAINT = 'checkpoints_transition_check';
        END IF;
        RETURN NEW;
    END IF;
    IF (OLD.state, NEW.state) IN (
        ('capturing', 'captured'), ('capturing', 'failed'),
        ('captured', 'sealed'), ('captured', 'deleted'), ('sealed', 'deleted'), ('failed', 'deleted')
    ) THEN
        RETURN NEW;
    END IF;
    RAISE EXCEPTION 'checkpoint % cannot go from % to %', OLD.id, OLD.state, NEW.state USING ERRCODE = 'check_violation', CONSTRAINT = 'checkpoints_transition_check';
END
$$;
CREATE TRIGGER checkpoints_begin BEFORE INSERT ON checkpoints FOR EACH ROW EXECUTE FUNCTION coppice_checkpoint_transition();
CREATE TRIGGER checkpoints_transition BEFORE UPDATE ON checkpoints FOR EACH ROW WHEN (OLD.state IS DISTINCT FROM NEW.state) EXECUTE FUNCTION coppice_checkpoint_transition();

-- A checkpoint is immutable: its place in the tree and what it holds never change, whoever writes.
CREATE FUNCTION coppice_checkpoint_immutable() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'checkpoint % is immutable', OLD.id USING ERRCODE = 'check_violation', CONSTRAINT = 'checkpoints_immutable_check';
END
$$;
CREATE TRIGGER checkpoints_immutable BEFORE UPDATE ON checkpoints FOR EACH ROW WHEN (
    (OLD.id, OLD.project_id, OLD.kind, OLD.shared, OLD.image_digest, OLD.vcpus, OLD.memory_mib, OLD.root_id, OLD.depth, OLD.created_at)
        IS DISTINCT FROM (NEW.id, NEW.project_id, NEW.kind, NEW.shared, NEW.image_digest, NEW.vcpus, NEW.memory_mib, NEW.root_id, NEW.depth, NEW.created_at)
    OR (OLD.parent_id, OLD.workspace_id) IS DISTINCT FROM (NEW.parent_id, NEW.workspace_id)
    OR (OLD.captured_at IS NOT NULL AND OLD.captured_at IS DISTINCT FROM NEW.captured_at)
) EXECUTE FUNCTION coppice_checkpoint_immutable();

CREATE FUNCTION coppice_operation_transition() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        IF NEW.state NOT IN ('pending', 'running') THEN
            RAISE EXCEPTION 'an operation cannot begin as %', NEW.state USING ERRCODE = 'check_violation', CONSTRAINT = 'operations_transition_check';
        END IF;
        RETURN NEW;
    END IF;
    IF (OLD.state, NEW.state) IN (
        ('pending', 'running'), ('pending', 'failed'),
        ('running', 'succeeded'), ('running', 'failed'), ('running', 'pending')
    ) THEN
        RETURN NEW;
    END IF;
    RAISE EXCEPTION 'operation % cannot go from % to %', OLD.id, OLD.state, NEW.state USING ERRCODE = 'check_violation', CONSTRAINT = 'operations_transition_check';
END
$$;
CREATE TRIGGER operations_begin BEFORE INSERT ON operations FOR EACH ROW EXECUTE FUNCTION coppice_operation_transition();
CREATE TRIGGER operations_transition BEFORE UPDATE ON operations FOR EACH ROW WHEN (OLD.state IS DISTINCT FROM NEW.state) EXECUTE FUNCTION coppice_operation_transition();

-- Reports are append-only, for the owner too.
CREATE FUNCTION coppice_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% is append-only', TG_TABLE_NAME USING ERRCODE = 'insufficient_privilege';
END
$$;
CREATE TRIGGER reseal_reports_append_only BEFORE UPDATE OR DELETE ON reseal_reports FOR EACH ROW EXECUTE FUNCTION coppice_append_only();

-- Makes the partitions of this month and the next two. The controller calls it daily; the default partition catches
-- rows should nobody have called for a quarter, so that a clock never stops a fork.
CREATE FUNCTION coppice_make_partitions() RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
DECLARE
    month date;
    part  text;
BEGIN
    FOR i IN 0..2 LOOP
        month := (date_trunc('month', now() AT TIME ZONE 'UTC') + make_interval(months => i))::date;
        part := 'reseal_reports_' || to_char(month, 'YYYYMM');
        IF to_regclass('public.' || part) IS NULL THEN
            EXECUTE format('CREATE TABLE public.%I PARTITION OF public.reseal_reports FOR VALUES FROM (%L) TO (%L)',
                part, month::text || ' 00:00:00+00', (month + interval '1 month')::date::text || ' 00:00:00+00');
        END IF;
    END LOOP;
END
$$;
SELECT coppice_make_partitions();
CREATE TABLE reseal_reports_default PARTITION OF reseal_reports DEFAULT;

-- Rights and row-level security.
GRANT USAGE ON SCHEMA public TO coppice_app;
REVOKE EXECUTE ON FUNCTION coppice_make_partitions() FROM PUBLIC;
GRANT EXECUTE ON FUNCTION coppice_make_partitions() TO coppice_app;
GRANT SELECT, INSERT, UPDATE ON projects, api_keys, runners, images, operations, workspaces, sandboxes, checkpoints, sessions TO coppice_app;
GRANT SELECT, INSERT, UPDATE, DELETE ON image_locations, attach_tokens, ports TO coppice_app;
GRANT SELECT, INSERT ON reseal_reports TO coppice_app;

DO $$
DECLARE
    tab text;
BEGIN
    FOREACH tab IN ARRAY ARRAY['projects', 'api_keys', 'runners', 'images', 'image_locations', 'operations', 'workspaces', 'sandboxes',
                               'checkpoints', 'reseal_reports', 'sessions', 'attach_tokens', 'ports'] LOOP
        EXECUTE format('ALTER TABLE %I ENABLE ROW LEVEL SECURITY', tab);
        EXECUTE format('ALTER TABLE %I FORCE ROW LEVEL SECURITY', tab);
        -- The sub-selects are evaluated once per query, not once per row.
        EXECUTE format($policy$CREATE POLICY %I ON %I
            USING (project_id = (SELECT current_setting('coppice.project_id', true)) OR (SELECT current_setting('coppice.project_id', true)) = 'system')
            WITH CHECK (project_id = (SELECT current_setting('coppice.project_id', true)) OR (SELECT current_setting('coppice.project_id', true)) = 'system')$policy$, tab || '_tenant', tab);
    END LOOP;
    -- A connection without a scope must not see what is shared either.
    FOREACH tab IN ARRAY ARRAY['images', 'image_locations', 'checkpoints'] LOOP
        EXECUTE format($policy$CREATE POLICY %I ON %I FOR SELECT USING (shared AND (SELECT current_setting('coppice.project_id', true)) <> '')$policy$, tab || '_shared', tab);
    END LOOP;
    CREATE POLICY runners_shared ON runners FOR SELECT USING ((SELECT current_setting('coppice.project_id', true)) <> '');
END
$$;
