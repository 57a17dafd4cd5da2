DROP TABLE session_counts;
DROP INDEX sessions_workspace_idx;
REVOKE DELETE ON sessions FROM coppice_app;
