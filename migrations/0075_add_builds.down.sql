DROP INDEX operations_builds_idx;
DROP INDEX checkpoints_build_key_idx;
ALTER TABLE checkpoints DROP COLUMN published;
DROP TABLE build_logs;
DROP TABLE project_images;
