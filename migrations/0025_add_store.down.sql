DROP TRIGGER checkpoints_forget_stored ON checkpoints;
DROP TABLE store_debris, store_released, checkpoint_objects, store_objects, seals, checkpoint_copies;
DROP FUNCTION coppice_forget_stored(), coppice_abandon_seal(), coppice_seal_prefix(text, text, bigint), coppice_release_objects(), coppice_need_object();
DROP INDEX checkpoints_sealed_template_idx;
DROP TRIGGER checkpoints_sealed_immutable ON checkpoints;
ALTER TABLE checkpoints
    DROP CONSTRAINT checkpoints_sealed_check, DROP CONSTRAINT checkpoints_manifest_check,
    DROP COLUMN sealed_at, DROP COLUMN manifest_key, DROP COLUMN manifest_digest, DROP COLUMN manifest_bytes, DROP COLUMN stored_bytes;
