DROP TRIGGER workspaces_end_ports ON workspaces;
DROP FUNCTION coppice_end_ports();
DROP INDEX ports_project_idx;
ALTER TABLE quotas
    DROP COLUMN allow_all_egress,
    DROP CONSTRAINT quotas_ports_check,
    DROP COLUMN max_ports;
