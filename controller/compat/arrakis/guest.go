package arrakis

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path"
	"strconv"
	"strings"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/controller/compat/shared"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// directory is where Arrakis' commands run, and where its relative paths begin.
const directory = "/tmp/server_files"

// rootUser is who runs Arrakis' commands, whatever user the image names: they own the directory.
const rootUser = "root"

// merge runs the program after it with one stream for its output and its errors, as Arrakis does.
const merge = `exec "$@" 2>&1`

const (
	maxFiles    = 1000     // of one request
	maxPath     = 4096     // bytes
	maxDownload = 16 << 20 // bytes of all files of one answer
	maxAnswer   = 32 << 20 // of these files as JSON, which has six bytes for some characters
)

// prepare makes a started VM ready for commands: its directory and its ports are there.
func (c call) prepare(r *http.Request, ws coppice.Workspace) error {
	if _, err := c.MakeDirectory(r.Context(), ws.ID, coppice.MakeDirectoryRequest{Path: directory, Parents: true}); err != nil {
		return err
	}
	return c.forward(r, ws)
}

// command runs a command. A command that fails is a good answer, which says so.
func command(r *http.Request, c call) (any, error) {
	q := struct {
		Cmd      string `json:"cmd"`
		Blocking *bool  `json:"blocking"`
	}{}
	if err := readJSON(c.body, &q); err != nil {
		return nil, err
	}
	if strings.TrimSpace(q.Cmd) == "" {
		return nil, shared.Failf(http.StatusBadRequest, "Command cannot be empty")
	}
	ws, err := c.running(r)
	if err != nil {
		return nil, err
	}
	req := coppice.ExecRequest{Command: []string{"bash", "-c", merge, "bash", "bash", "-c", q.Cmd}, Cwd: directory, User: rootUser}
	if q.Blocking != nil && !*q.Blocking {
		s, err := c.StartSession(r.Context(), ws.ID, req)
		if err != nil {
			return nil, err
		}
		return commandView{Output: "Command started in background", SessionID: s.ID}, nil
	}
	result, err := c.Exec(r.Context(), ws.ID, req)
	if err != nil {
		return nil, err
	}
	stdout, stderr, err := result.Output()
	if err != nil {
		return nil, err
	}
	return commandView{
		Output: string(append(stdout, stderr...)), Error: ending(result), SessionID: result.Session.ID, ExitCode: &result.ExitCode,
		Truncated: result.StdoutTruncated || result.StderrTruncated,
	}, nil
}

// commandView is Arrakis' answer to a command; the fields after the first two are additions. Bytes of output that are no text become U+FFFD.
type commandView struct {
	Output    string `json:"output"`
	Error     string `json:"error"`
	SessionID string `json:"sessionId"`
	ExitCode  *int   `json:"exitCode,omitempty"`
	Truncated bool   `json:"outputTruncated,omitempty"` // the beginning is missing
}

// ending says how a program failed, in the words of Go's os package, as Arrakis does; empty if it did not.
func ending(result coppice.ExecResult) string {
	if result.Signal != "" {
		if n := unix.SignalNum(result.Signal); n != 0 {
			return "signal: " + n.String()
		}
		return "signal: " + result.Signal
	}
	if result.ExitCode != 0 {
		return "exit status " + strconv.Itoa(result.ExitCode)
	}
	return ""
}

// place is the absolute path of a file.
func place(name string) (string, *shared.StatusError) {
	if name == "" || len(name) > maxPath || strings.ContainsRune(name, 0) {
		return "", shared.Failf(http.StatusBadRequest, "path %q: a path has 1 to %d bytes, and no NUL", shared.Clip(name), maxPath)
	}
	if path.IsAbs(name) {
		return path.Clean(name), nil
	}
	return path.Join(directory, name), nil
}

// escaped is how many bytes a text has as JSON, or a few more.
func escaped(text string) int {
	n := len(text)
	for _, r := range text {
		switch {
		case r < ' ', r == utf8.RuneError, r == '\u2028', r == '\u2029':
			n += 5
		case r == '"', r == '\\':
			n++
		}
	}
	return n
}

type fileView struct {
	Path    string `json:"path"`
	Content string `json:"content"`
	Error   string `json:"error"`
}

// sentFile is a file of an upload.
type sentFile struct {
	Path    string `json:"path"`
	Content string `json:"content"`
}

// readFiles decodes an upload, {"files": [...]}. It decodes one file after the other, and ends at the first that is no file or one too many: a list
// of millions of small values would be many times as large in memory.
func readFiles(body []byte) ([]sentFile, error) {
	d := json.NewDecoder(bytes.NewReader(body))
	bad := func(err error) error {
		return shared.Failf(http.StatusBadRequest, "Invalid request format: %s", shared.Clip(strings.TrimPrefix(err.Error(), "json: ")))
	}
	open := func(want json.Delim) error {
		t, err := d.Token()
		if err == nil && t != want {
			err = fmt.Errorf("there is %.20v in place of %v", t, want)
		}
		return err
	}
	var files []sentFile
	if err := open('{'); err != nil {
		return nil, bad(err)
	}
	for d.More() {
		key, err := d.Token()
		if err != nil {
			return nil, bad(err)
		}
		if key != "files" { // unknown fields are ignored, as Arrakis does
			var other json.RawMessage
			if err := d.Decode(&other); err != nil {
				return nil, bad(err)
			}
			continue
		}
		if err := open('['); err != nil {
			return nil, bad(err)
		}
		for files = nil; d.More(); {
			if len(files) == maxFiles {
				return nil, shared.Failf(http.StatusBadRequest, "files: there are more than %d", maxFiles)
			}
			var f sentFile
			if err := d.Decode(&f); err != nil {
				return nil, bad(err)
			}
			files = append(files, f)
		}
		if err := open(']'); err != nil {
			return nil, bad(err)
		}
	}
	if err := open('}'); err != nil {
		return nil, bad(err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, shared.Failf(http.StatusBadRequest, "Invalid request format: there is more than one value")
	}
	if len(files) == 0 {
		return nil, shared.Failf(http.StatusBadRequest, "No files provided for upload")
	}
	return files, nil
}

// upload writes files of text. Those before one that fails stay, as with Arrakis.
func upload(r *http.Request, c call) (any, error) {
	files, err := readFiles(c.body)
	if err != nil {
		return nil, err
	}
	c.body = nil
	places := make([]string, len(files))
	for i, f := range files {
		var bad *shared.StatusError
		if places[i], bad = place(f.Path); bad != nil {
			return nil, bad
		}
	}
	ws, err := c.running(r)
	if err != nil {
		return nil, err
	}
	for i, f := range files {
		if _, err := c.WriteFile(r.Context(), ws.ID, places[i], strings.NewReader(f.Content), coppice.WriteOptions{Mkdirs: true}); err != nil {
			return nil, err
		}
	}
	return map[string]any{}, nil
}

// download reads files of text. A file that cannot be read has an error of its own in the answer.
func download(r *http.Request, c call) (any, error) {
	paths := strings.FieldsFunc(r.URL.Query().Get("paths"), func(r rune) bool { return r == ',' })
	switch n := len(paths); {
	case n == 0:
		return nil, shared.Failf(http.StatusBadRequest, "Missing 'paths' query parameter")
	case n > maxFiles:
		return nil, shared.Failf(http.StatusBadRequest, "paths: there are more than %d", maxFiles)
	}
	ws, err := c.running(r)
	if err != nil {
		return nil, err
	}
	files, left, answer := make([]fileView, len(paths)), int64(maxDownload), maxAnswer
	for i, name := range paths {
		files[i] = fileView{Path: name}
		content, err := c.read(r, ws, name, left)
		if err != nil {
			if unreadable := (*shared.StatusError)(nil); errors.As(err, &unreadable) {
				files[i].Error = unreadable.Message
				continue
			}
			return nil, err
		}
		if answer -= escaped(content); answer < 0 {
			return nil, shared.Failf(http.StatusRequestEntityTooLarge, "the files have more than %d bytes as JSON; copy them with coppice ws cp", maxAnswer)
		}
		files[i].Content = content
		left -= int64(len(content))
	}
	return map[string]any{"files": files}, nil
}

// read reads one file of at most so many bytes. A failure is about this file alone; any other error is about the VM.
func (c call) read(r *http.Request, ws coppice.Workspace, name string, most int64) (string, error) {
	at, bad := place(name)
	if bad != nil {
		return "", bad
	}
	info, err := c.StatFile(r.Context(), ws.ID, at)
	if err == nil && info.Type == coppice.FileTypeFile && info.Size > most {
		return "", shared.Failf(http.StatusRequestEntityTooLarge, "the files of one answer have more than %d bytes; copy this one with coppice ws cp", maxDownload)
	}
	var b []byte
	if err == nil {
		b, err = c.ReadFile(r.Context(), ws.ID, at, most)
	}
	var refused *coppice.Error
	switch {
	case errors.As(err, &refused) && refused.Status >= http.StatusBadRequest && refused.Status < http.StatusInternalServerError && refused.Status != http.StatusTooManyRequests:
		return "", shared.Failf(refused.Status, "%s", refused.Error())
	case err != nil:
		return "", err
	case !utf8.Valid(b):
		return "", shared.Failf(http.StatusUnsupportedMediaType, "the file is not text in UTF-8, and Arrakis' API has only text; copy it with coppice ws cp")
	}
	return string(b), nil
}
