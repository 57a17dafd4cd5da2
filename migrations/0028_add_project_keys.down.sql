DROP TABLE project_keys;
ALTER TABLE projects DROP COLUMN encryption;
