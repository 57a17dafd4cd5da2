-- At the end of its time a workspace is terminated, or suspended. A resume gives the time anew, so it is kept.
ALTER TABLE workspaces
    ADD COLUMN on_ttl text NOT NULL DEFAULT 'terminate',
    ADD COLUMN ttl_seconds bigint,
    ADD CONSTRAINT workspaces_on_ttl_check CHECK (on_ttl IN ('suspend', 'terminate'));
