-- Heartbeats write less.

-- A heartbeat changes no field of a runner that the audit log records. A comparison of the rows as JSON costs more than the change itself.
-- The migration locks runners first, as heartbeats do.
CREATE FUNCTION coppice_runner_changed(was runners, now_ runners) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    was.heartbeat_at := now_.heartbeat_at;
    was.lease_expires_at := now_.lease_expires_at;
    was.allocated := now_.allocated;
    was.disk_free_mb := now_.disk_free_mb;
    was.beat := now_.beat;
    was.beat_epoch := now_.beat_epoch;
    was.beat_at := now_.beat_at;
    was.data_log := now_.data_log;
    was.data_recorded := now_.data_recorded;
    RETURN was IS DISTINCT FROM now_;
END
$$;
DROP TRIGGER runners_audit ON runners;
CREATE TRIGGER runners_begin_audit AFTER INSERT OR DELETE ON runners FOR EACH ROW EXECUTE FUNCTION coppice_audit_row('id');
CREATE TRIGGER runners_audit AFTER UPDATE ON runners FOR EACH ROW WHEN (coppice_runner_changed(OLD, NEW)) EXECUTE FUNCTION coppice_audit_row('id');

-- What each sandbox has used. Reports are cumulative, so one row contains as much as all samples of a sandbox. Controllers no longer write
-- samples. They add the existing samples to the totals and remove them, and also the samples that controllers of an older version still write.
CREATE TABLE usage_totals (
    sandbox_id     text COLLATE "C" CONSTRAINT usage_totals_pkey PRIMARY KEY,
    project_id     text COLLATE "C" NOT NULL CONSTRAINT usage_totals_project_fk REFERENCES projects (id),
    workspace_id   text COLLATE "C" NOT NULL,
    cpu_seconds    double precision NOT NULL,
    sent_bytes     bigint NOT NULL,
    received_bytes bigint NOT NULL,
    sampled_at     timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT usage_totals_check CHECK (cpu_seconds >= 0 AND sent_bytes >= 0 AND received_bytes >= 0)
) WITH (fillfactor = 70); -- updates change no column of an index and stay on their page
CREATE INDEX usage_totals_workspace_idx ON usage_totals (workspace_id);
GRANT SELECT, INSERT, UPDATE ON usage_totals TO coppice_app;
ALTER TABLE usage_totals ENABLE ROW LEVEL SECURITY;
ALTER TABLE usage_totals FORCE ROW LEVEL SECURITY;
CREATE POLICY usage_totals_tenant ON usage_totals
    USING (project_id = (SELECT current_setting('coppice.project_id', true)) OR (SELECT current_setting('coppice.project_id', true)) = 'system')
    WITH CHECK (project_id = (SELECT current_setting('coppice.project_id', true)) OR (SELECT current_setting('coppice.project_id', true)) = 'system');

DROP TRIGGER usage_samples_append_only ON usage_samples;
GRANT DELETE ON usage_samples TO coppice_app;
