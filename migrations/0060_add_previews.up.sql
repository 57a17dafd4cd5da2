-- A preview is a port that the router of previews leads to, by a name of its own. It listens nowhere, so it has no address. It shares ids, quota,
-- audit and the end of its workspace with forwarded ports. visibility is empty for a forwarded port.
ALTER TABLE ports
    ADD COLUMN visibility text NOT NULL DEFAULT '',
    ADD COLUMN expires_at timestamptz,
    ADD CONSTRAINT ports_visibility_check CHECK (visibility IN ('', 'private', 'signed', 'public')),
    ADD CONSTRAINT ports_preview_check CHECK (visibility <> '' AND listen = '' OR visibility = '' AND expires_at IS NULL);

-- A name leads to one preview at most.
CREATE UNIQUE INDEX ports_preview_key ON ports (workspace_id, guest_port) WHERE visibility <> '';
CREATE INDEX ports_expiry_idx ON ports (project_id, expires_at) WHERE expires_at IS NOT NULL;
