-- The key that a preview was opened with. When the key is revoked, its signed previews end.
ALTER TABLE ports ADD COLUMN key_id text COLLATE "C" CONSTRAINT ports_key_fk REFERENCES api_keys (id);
CREATE INDEX ports_key_idx ON ports (key_id) WHERE key_id IS NOT NULL;
