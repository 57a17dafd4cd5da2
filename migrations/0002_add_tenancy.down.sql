-- Only for tests: production schemas go forward.
DROP TRIGGER checkpoints_count ON checkpoints;
DROP TRIGGER projects_quotas ON projects;
DROP FUNCTION coppice_count_checkpoint(), coppice_make_quotas();
DROP TABLE quotas;
DROP INDEX checkpoints_children_idx;
ALTER TABLE attach_tokens DROP COLUMN key_id;
ALTER TABLE api_keys DROP COLUMN parent_id, DROP COLUMN last_used_at;
DROP INDEX api_keys_project_idx;
DROP INDEX projects_live_name_key;
ALTER TABLE projects DROP COLUMN deleted_at, ADD CONSTRAINT projects_name_key UNIQUE (name);
