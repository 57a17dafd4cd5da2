DROP TRIGGER runners_begin_audit ON runners;
DROP TRIGGER runners_audit ON runners;
CREATE TRIGGER runners_audit AFTER INSERT OR UPDATE OR DELETE ON runners FOR EACH ROW EXECUTE FUNCTION coppice_audit_row('id');
DROP FUNCTION coppice_runner_changed(runners, runners);
-- The owner is under row-level security too, unless it is a superuser; this lasts until the migration ends.
SELECT set_config('coppice.project_id', 'system', true);
INSERT INTO usage_samples (project_id, workspace_id, sandbox_id, cpu_seconds, sent_bytes, received_bytes, created_at)
    SELECT project_id, workspace_id, sandbox_id, cpu_seconds, sent_bytes, received_bytes, sampled_at FROM usage_totals ON CONFLICT DO NOTHING;
REVOKE DELETE ON usage_samples FROM coppice_app;
CREATE TRIGGER usage_samples_append_only BEFORE UPDATE OR DELETE ON usage_samples FOR EACH ROW EXECUTE FUNCTION coppice_append_only();
DROP TABLE usage_totals;
