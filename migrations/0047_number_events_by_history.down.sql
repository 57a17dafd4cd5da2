ALTER TABLE events ALTER COLUMN id SET DEFAULT nextval('events_id_seq');
DROP FUNCTION coppice_event_history();
