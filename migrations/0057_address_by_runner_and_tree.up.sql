-- From now on, an address of a guest is unique among the living sandboxes of a runner and among those of a tree. Before, it was
-- unique in the whole cluster. A tree is one workspace that was made from an image, and everything that grew from it: only
-- machines of one tree have memory in common. The ids of trees are unique in the cluster.
-- See docs/adr/0045-addresses-by-runner-and-tree.md.

-- The owner is under row-level security too, unless it is a superuser; this lasts until the migration ends.
SELECT set_config('coppice.project_id', 'system', true);

-- The sandboxes of a project from before this migration become one tree, whose id is the project's: no two of them share an
-- address. Sandboxes that have ended keep '', which means the same, so the migration writes only living ones.
ALTER TABLE sandboxes ADD COLUMN tree_id text COLLATE "C" NOT NULL DEFAULT '';
ALTER TABLE sandboxes ALTER COLUMN tree_id DROP DEFAULT;
ALTER TABLE sandboxes DISABLE TRIGGER USER;
UPDATE sandboxes SET tree_id = project_id WHERE ended_at IS NULL;
ALTER TABLE sandboxes ENABLE TRIGGER USER;

-- A controller of the previous release inserts sandboxes without a tree. This trigger then sets the tree of the checkpoint that the
-- workspace grows from.
CREATE FUNCTION coppice_default_tree() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.tree_id := coalesce((
        SELECT nullif(s.tree_id, '') FROM workspaces w JOIN checkpoints c ON c.id = w.checkpoint_id JOIN sandboxes s ON s.id = c.sandbox_id
        WHERE w.id = NEW.workspace_id), NEW.project_id);
    RETURN NEW;
END
$$;
CREATE TRIGGER sandboxes_default_tree BEFORE INSERT ON sandboxes FOR EACH ROW WHEN (NEW.tree_id IS NULL) EXECUTE FUNCTION coppice_default_tree();

-- No other index may begin with one of these columns: the planner could use it instead, for a probe of both columns.
CREATE UNIQUE INDEX sandboxes_live_runner_ip_key ON sandboxes (runner_id, ip) WHERE ended_at IS NULL;
CREATE UNIQUE INDEX sandboxes_live_tree_ip_key ON sandboxes (tree_id, ip) WHERE ended_at IS NULL;
DROP INDEX sandboxes_live_ip_key;
DROP INDEX sandboxes_live_runner_idx;

-- A runner without free addresses is full (placement.MaxSandboxes), so a search for the emptiest runners finds it last.
CREATE OR REPLACE FUNCTION coppice_load_of(r runners, OUT class_key text, OUT open boolean, OUT cap_sandboxes bigint, OUT cap_vcpus bigint, OUT cap_memory_mib bigint)
    LANGUAGE sql IMMUTABLE AS $$
    SELECT r.class_key, NOT r.draining AND r.fenced_at IS NULL AND r.removed_at IS NULL,
        least(coalesce(nullif((r.capacity ->> 'sandboxes')::bigint, 0), 64000), 64000),
        coalesce((r.capacity ->> 'vcpus')::bigint, 0), coalesce((r.capacity ->> 'memory_mib')::bigint, 0)
$$;
UPDATE runner_loads SET cap_sandboxes = 64000 WHERE cap_sandboxes = 0 OR cap_sandboxes > 64000;
