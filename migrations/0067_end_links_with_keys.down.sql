DROP INDEX ports_key_idx;
ALTER TABLE ports DROP COLUMN key_id;
