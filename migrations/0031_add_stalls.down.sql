DROP TRIGGER sandboxes_stall_events ON sandboxes;
DROP FUNCTION coppice_stall_events();
ALTER TABLE sandboxes DROP COLUMN stalled_message, DROP COLUMN stalled_code, DROP COLUMN stalled_at;
