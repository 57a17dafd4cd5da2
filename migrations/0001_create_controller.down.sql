-- Only for tests: production schemas go forward. The role stays, because it belongs to the whole cluster.
ALTER TABLE workspaces DROP CONSTRAINT workspaces_parent_fk, DROP CONSTRAINT workspaces_checkpoint_fk, DROP CONSTRAINT workspaces_sandbox_fk;
DROP TABLE ports, attach_tokens, sessions, reseal_reports, checkpoints, sandboxes, workspaces, operations, image_locations, images, runners, api_keys, projects;
DROP FUNCTION coppice_make_partitions(), coppice_append_only(), coppice_operation_transition(), coppice_checkpoint_immutable(), coppice_checkpoint_transition(), coppice_workspace_transition();
