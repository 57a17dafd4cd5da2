-- Only for tests: production schemas go forward. The transition function goes with 0001.
DROP TABLE usage_samples, retention_policies, workspace_uses;
DROP FUNCTION coppice_make_usage_partitions();
ALTER TABLE checkpoints DROP COLUMN pinned;
ALTER TABLE workspaces DROP COLUMN idle_seconds, DROP COLUMN on_idle, DROP COLUMN auto_resume;
