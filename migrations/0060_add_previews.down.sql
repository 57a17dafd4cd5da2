-- The table forces row security on its owner. This runs for every project.
SELECT set_config('coppice.project_id', 'system', true), set_config('coppice.origin', 'migration  0060_add_previews', true); -- who the audit log says it was
DELETE FROM ports WHERE visibility <> '';
ALTER TABLE ports DROP COLUMN visibility, DROP COLUMN expires_at;
