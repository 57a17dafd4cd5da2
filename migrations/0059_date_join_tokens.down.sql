-- A token is good again in every history of the database.
ALTER TABLE runner_tokens DROP COLUMN history;
