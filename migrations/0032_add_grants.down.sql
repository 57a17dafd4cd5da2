ALTER TABLE workspaces DROP COLUMN grants_key, DROP COLUMN grants_until;
ALTER TABLE runners DROP COLUMN egress_key, DROP COLUMN egress_url;
DROP TABLE grant_holders;
DROP TABLE grants;
DROP TABLE project_authorities;
DROP TABLE secrets;
DROP FUNCTION coppice_audit_grants();
