package e2b

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"path"
	"strconv"
	"strings"

	"github.com/coppice-dev/coppice/controller/compat/shared"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

const (
	maxUploadFiles = 1000 // files of one upload
	maxPath        = 4096

	// maxUnpacked bounds the unpacked size of a compressed upload, as the REST API bounds a file.
	maxUnpacked = 10 << 30
)

// download sends a file, or the range of it that the client asks for.
func download(w http.ResponseWriter, r *http.Request) error {
	ctx := r.Context()
	v := visitOf(ctx)
	u, err := v.account(ctx)
	if err != nil {
		return err
	}
	name := u.resolve(r.URL.Query().Get("path"))
	info, err := v.led(ctx, name)
	if err != nil {
		return fileError(err, name)
	}
	if info.Type != coppice.FileTypeFile {
		return shared.Failf(http.StatusBadRequest, "path '%s' is a directory or no regular file", name)
	}
	body, info, err := v.OpenFile(ctx, v.ws, name)
	if err != nil {
		return fileError(err, name)
	}
	defer body.Close()
	h := w.Header()
	h.Set("Content-Type", "application/octet-stream") // a browser must not show a file of a guest as a page of this server
	h.Set("Content-Disposition", mime.FormatMediaType("inline", map[string]string{"filename": path.Base(name)}))
	h.Set("Accept-Ranges", "bytes")
	h.Set("Last-Modified", info.MTime.UTC().Format(http.TimeFormat))
	from, to, partial, err := byteRange(r.Header.Get("Range"), info.Size)
	if err != nil {
		h.Set("Content-Range", fmt.Sprintf("bytes */%d", info.Size))
		return err
	}
	if _, err := io.CopyN(io.Discard, body, from); err != nil {
		return err
	}
	h.Set("Content-Length", strconv.FormatInt(to-from, 10))
	status := http.StatusOK
	if partial {
		h.Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", from, to-1, info.Size))
		status = http.StatusPartialContent
	}
	w.WriteHeader(status)
	if _, err := io.CopyN(w, body, to-from); err != nil {
		panic(http.ErrAbortHandler) // the client must not think that it is complete
	}
	return nil
}

// number reads a decimal number without a sign.
func number(s string) (n int64, ok bool) {
	u, err := strconv.ParseUint(s, 10, 62)
	return int64(u), err == nil
}

// byteRange reads a Range header with one range. Any other header means the whole file, as the standard permits.
func byteRange(header string, size int64) (from, to int64, partial bool, err error) {
	spec, ok := strings.CutPrefix(header, "bytes=")
	first, last, dash := strings.Cut(strings.TrimSpace(spec), "-")
	if !ok || !dash || strings.Contains(spec, ",") {
		return 0, size, false, nil
	}
	beyond := shared.Failf(http.StatusRequestedRangeNotSatisfiable, "the file has %d bytes", size)
	if first == "" { // the last bytes
		n, ok := number(last)
		if !ok {
			return 0, size, false, nil
		}
		if n == 0 || size == 0 {
			return 0, 0, false, beyond
		}
		return max(size-n, 0), size, true, nil
	}
	a, ok := number(first)
	if !ok {
		return 0, size, false, nil
	}
	if a >= size {
		return 0, 0, false, beyond
	}
	to = size
	if last != "" {
		b, ok := number(last)
		if !ok || b < a {
			return 0, size, false, nil
		}
		to = min(size, b+1)
	}
	return a, to, true, nil
}

// written is a file in the answer to an upload.
type written struct {
	Path string `json:"path"`
	Name string `json:"name"`
	Type string `json:"type"`

	Metadata map[string]string `json:"metadata,omitempty"`
}

// upload writes the files of a request: the body, or the parts of a form.
func upload(w http.ResponseWriter, r *http.Request) error {
	ctx := r.Context()
	v := visitOf(ctx)
	u, err := v.account(ctx)
	if err != nil {
		return err
	}
	metadata, err := uploadMetadata(r.Header)
	if err != nil {
		return err
	}
	q := r.URL.Query()
	media, params, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil {
		return shared.Failf(http.StatusBadRequest, "Content-Type cannot be read")
	}
	body, err := unpack(r)
	if err != nil {
		return err
	}
	out := []written{}
	put := func(name string, from io.Reader) error {
		if name == "" || len(name) > maxPath || strings.ContainsRune(name, 0) {
			return shared.Failf(http.StatusBadRequest, "a file's path has 1 to %d bytes, and no NUL", maxPath)
		}
		name = u.resolve(name)
		from, err := whole(from)
		if err != nil {
			return shared.Failf(http.StatusBadRequest, "the file cannot be read: %s", shared.Clip(err.Error()))
		}
		info, err := v.WriteFile(ctx, v.ws, name, from, u.writeOptions())
		if err != nil {
			return fileError(err, name)
		}
		if err := v.setMetadata(ctx, u, name, metadata); err != nil {
			return fileError(err, name)
		}
		out = append(out, written{Path: info.Path, Name: path.Base(name), Type: "file", Metadata: metadata})
		return nil
	}
	switch media {
	case "application/octet-stream":
		err = put(q.Get("path"), body)
	case "multipart/form-data":
		err = eachFile(multipart.NewReader(body, params["boundary"]), q.Get("path"), put)
	default:
		err = shared.Failf(http.StatusBadRequest, "Content-Type must be multipart/form-data or application/octet-stream")
	}
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, out)
	return nil
}

// writeOptions make an upload as E2B does: into the file itself, which watchers see as a write. A user writes with its own rights.
// Root is named, too: the file is the user's from its beginning then, and watchers see no change of its owner.
func (u account) writeOptions() coppice.WriteOptions {
	return coppice.WriteOptions{Mkdirs: true, InPlace: true, User: u.name}
}

// smallUpload is the size up to which the layer waits for a whole file.
const smallUpload = 64 << 10

// whole reads a small file to its end before anything is written: watchers see one write then, in however many pieces it came.
func whole(from io.Reader) (io.Reader, error) {
	var head bytes.Buffer
	n, err := io.CopyN(&head, from, smallUpload)
	if errors.Is(err, io.EOF) {
		return &head, nil
	}
	if err != nil {
		return nil, err
	}
	return io.MultiReader(bytes.NewReader(head.Bytes()[:n]), from), nil
}

// unpack reads a body that may be compressed.
func unpack(r *http.Request) (io.Reader, error) {
	switch r.Header.Get("Content-Encoding") {
	case "", "identity":
		return r.Body, nil
	case "gzip":
		z, err := gzip.NewReader(r.Body)
		if err != nil {
			return nil, shared.Failf(http.StatusBadRequest, "the body is not gzip")
		}
		return http.MaxBytesReader(nil, z, maxUnpacked), nil
	}
	return nil, shared.Failf(http.StatusUnsupportedMediaType, "Content-Encoding must be gzip or absent")
}

// eachFile calls put for the files of a form, one after the other. The path of a request overrides the name of its only file.
func eachFile(form *multipart.Reader, only string, put func(name string, from io.Reader) error) error {
	for n := 0; ; n++ {
		part, err := form.NextRawPart()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return shared.Failf(http.StatusBadRequest, "the form cannot be read: %s", shared.Clip(err.Error()))
		}
		field, name := partName(part.Header.Get("Content-Disposition"))
		if field != "file" {
			n--
			if _, err := io.CopyN(io.Discard, part, maxBody); !errors.Is(err, io.EOF) {
				return shared.Failf(http.StatusBadRequest, "the form has a large field that is not a file")
			}
			continue
		}
		if n >= maxUploadFiles || only != "" && n > 0 {
			return shared.Failf(http.StatusBadRequest, "the form has too many files; at most %d, and with a path in the address only one", maxUploadFiles)
		}
		if only != "" {
			name = only
		}
		if err := put(name, part); err != nil {
			return err
		}
	}
}

// partName reads the names of a form's part. A file's name is a path here: mime/multipart would cut it to its last element.
func partName(disposition string) (field, file string) {
	kind, params, err := mime.ParseMediaType(disposition)
	if err != nil || kind != "form-data" {
		return "", ""
	}
	return params["name"], params["filename"]
}

// fileError gives errors of files the statuses that E2B's clients know.
func fileError(err error, name string) error {
	if errors.Is(err, coppice.CodeFileNotFound) {
		return shared.Failf(http.StatusNotFound, "path '%s' does not exist", name)
	}
	return err
}
