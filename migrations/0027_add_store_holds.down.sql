SELECT set_config('coppice.project_id', 'system', true);
DELETE FROM store_holds; -- and with them the needs of what is deleted
DROP TABLE store_holds;
DROP FUNCTION coppice_end_hold();
CREATE OR REPLACE FUNCTION coppice_forget_stored() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM seals WHERE checkpoint_id = NEW.id;
    DELETE FROM checkpoint_objects WHERE checkpoint_id = NEW.id;
    RETURN NULL;
END
$$;
