DROP INDEX workspaces_live_parent_idx;
DROP TABLE retention_rounds;
