ALTER TABLE runners DROP COLUMN removed_at, DROP COLUMN data_own_cert, DROP COLUMN data_url;
DROP TABLE runner_identities, runner_tokens, clusters;
