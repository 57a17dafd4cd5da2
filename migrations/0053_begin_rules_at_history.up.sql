-- A workspace begins with a version of its egress rules that is above those of the histories of the database before
-- (0047_number_events_by_history). One that began at 1 after a failover was taken, at every start of a controller, for one of
-- before it, and its rules were given to its runner again. In the first history this is 1, as it was. Only new rows are concerned.
ALTER TABLE workspaces ALTER COLUMN egress_version SET DEFAULT coppice_event_history() + 1;
