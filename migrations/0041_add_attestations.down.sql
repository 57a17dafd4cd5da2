DROP FUNCTION coppice_tidy_attestations(interval);
DROP TABLE attestations;
DROP FUNCTION coppice_audit_attestations();
