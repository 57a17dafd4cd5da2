-- What the grants of a workspace take, in bytes, as they are sent to its host: egress/grant.Size counts them, and what is new has a bound.
-- The owner is under row-level security too, unless it is a superuser; this lasts until the migration ends.
SELECT set_config('coppice.project_id', 'system', true), set_config('coppice.origin', 'migration  0037_measure_grants', true); -- who the audit log says it was

ALTER TABLE grants
    ADD COLUMN secret_bytes integer NOT NULL DEFAULT 2048, -- that the secret was admitted with; one that is kept elsewhere may grow
    ADD COLUMN bundle_bytes integer NOT NULL DEFAULT 4096; -- the defaults are for controllers of before, which go on while others are upgraded

-- What is there is estimated. Where it is too large to be sent, the proxy is told of as many grants as fit.
UPDATE grants g SET secret_bytes = x.secret_bytes,
    bundle_bytes = x.secret_bytes + 384 + length(g.name) + length(g.header)
        + (SELECT coalesce(sum(length(h) * CASE g.mode WHEN 'header' THEN 4 ELSE 1 END + 32), 0) FROM unnest(g.hosts) AS h)
        + (SELECT coalesce(sum(length(t) + 3), 0) FROM unnest(g.methods || g.paths) AS t)
FROM (SELECT o.id, coalesce(length(s.sealed), o.secret_bytes) AS secret_bytes FROM grants o LEFT JOIN secrets s ON s.id = o.secret_id) AS x
WHERE x.id = g.id;

ALTER TABLE grants
    ADD CONSTRAINT grants_bytes_check CHECK (secret_bytes >= 0 AND bundle_bytes >= secret_bytes);
