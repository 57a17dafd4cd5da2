package e2b

import (
	"context"
	"errors"
	"maps"
	"net/http"
	"slices"
	"strings"

	"github.com/coppice-dev/coppice/controller/compat/shared"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// E2B's metadata of files is in extended attributes with this prefix.
const attributePrefix = "user.e2b."

const headerMetadata = "X-Metadata-"

// The bounds of the metadata of a file, which are E2B's.
const (
	maxMetadataKey   = 246
	maxMetadataBytes = 4096
)

// uploadMetadata reads the metadata that an upload gives its files.
func uploadMetadata(h http.Header) (map[string]string, error) {
	out, size := map[string]string{}, 0
	for name, values := range h {
		key, ok := strings.CutPrefix(name, headerMetadata)
		if !ok {
			continue
		}
		key = strings.ToLower(key)
		size += len(key) + len(values[0])
		if key == "" || len(key) > maxMetadataKey || size > maxMetadataBytes || len(values) != 1 {
			return nil, shared.Failf(http.StatusBadRequest, "metadata: a key has 1 to %d characters and one value, and all of it at most %d bytes", maxMetadataKey, maxMetadataBytes)
		}
		out[key] = values[0]
	}
	return out, nil
}

// fileMetadata is the metadata among the attributes of a file.
func fileMetadata(attributes map[string]string) map[string]string {
	out := map[string]string{}
	for name, value := range attributes {
		if key, ok := strings.CutPrefix(name, attributePrefix); ok {
			out[key] = value
		}
	}
	return out
}

// setMetadata replaces the metadata of a file: that of an upload counts, and without any the file has none. The agent in an old
// checkpoint knows no metadata, so there is none to remove.
func (v visit) setMetadata(ctx context.Context, u account, name string, metadata map[string]string) error {
	info, err := v.Stat(ctx, v.ws, name, coppice.StatOptions{User: u.asUser(), Follow: true, XAttrs: true})
	if errors.Is(err, coppice.CodeUnsupported) && len(metadata) == 0 {
		return nil
	}
	if err != nil {
		return err
	}
	had := fileMetadata(info.XAttrs)
	if maps.Equal(had, metadata) {
		return nil
	}
	change := coppice.SetFileAttributesRequest{Path: name, User: u.asUser(), Set: map[string]string{}}
	for key, value := range metadata {
		change.Set[attributePrefix+key] = value
	}
	for _, key := range slices.Sorted(maps.Keys(had)) {
		if _, stays := metadata[key]; !stays {
			change.Remove = append(change.Remove, attributePrefix+key)
		}
	}
	_, err = v.SetFileAttributes(ctx, v.ws, change)
	return err
}
