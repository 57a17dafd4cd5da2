ALTER TABLE workspaces ALTER COLUMN egress_version SET DEFAULT 1;
