CREATE OR REPLACE FUNCTION coppice_forget_stored() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM seals WHERE checkpoint_id = NEW.id;
    DELETE FROM checkpoint_objects WHERE checkpoint_id = NEW.id AND NOT EXISTS (SELECT 1 FROM store_holds h WHERE h.checkpoint_id = NEW.id);
    RETURN NULL;
END
$$;
DROP INDEX checkpoint_copies_sums_idx;
DROP FUNCTION coppice_id_sum(text);
