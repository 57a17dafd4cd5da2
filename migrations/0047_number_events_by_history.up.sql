-- A standby that is promoted may lack the last transactions of the server before it. Its sequence then hands out ids of events
-- that readers have seen already, with other events, and a reader that goes on behind such an id would miss them. The timeline of
-- the server, which every promotion and every recovery to a point in time raises, is now the upper part of an id: ids of one
-- history are above all ids of the histories before it, without any step that somebody could forget. The first timeline has the
-- ids that it had.
CREATE FUNCTION coppice_event_history() RETURNS bigint LANGUAGE sql VOLATILE AS $$
    SELECT (('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::bigint - 1) << 40
$$;
ALTER TABLE events ALTER COLUMN id SET DEFAULT coppice_event_history() + nextval('events_id_seq');
