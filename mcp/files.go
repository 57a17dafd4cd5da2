package mcp

import (
	"context"
	"encoding/base64"
	"fmt"
	"io"
	"strings"
	"time"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

type fileReadIn struct {
	workspaceRef
	Path     string `json:"path" jsonschema:"absolute path" length:"1,4096"`
	Offset   int64  `json:"offset,omitempty" jsonschema:"position of the first byte to read" range:"0,1073741824"`
	MaxBytes int    `json:"max_bytes,omitempty" jsonschema:"how much to return" range:"1,65536" default:"16384"`
}

type fileReadOut struct {
	guestBytes
	Workspace  string `json:"workspace"`
	Path       string `json:"path"`
	SizeBytes  int64  `json:"size_bytes"`
	Mode       string `json:"mode"`
	Offset     int64  `json:"offset"`
	NextOffset int64  `json:"next_offset,omitempty" jsonschema:"the offset for the rest, if there is one"`
}

type fileWriteIn struct {
	workspaceRef
	Path     string `json:"path" jsonschema:"absolute path" length:"1,4096"`
	Content  string `json:"content" jsonschema:"the whole new content"`
	Encoding string `json:"encoding,omitempty" jsonschema:"how content is written here" enum:"utf-8|base64" default:"\"utf-8\""`
	Mode     string `json:"mode,omitempty" jsonschema:"octal permission bits, such as 0755; an existing file keeps its own if absent" length:"3,4"`
}

type fileWriteOut struct {
	Workspace string `json:"workspace"`
	Path      string `json:"path"`
	SizeBytes int64  `json:"size_bytes"`
}

type fileListIn struct {
	workspaceRef
	Path   string `json:"path" jsonschema:"absolute path of a directory" length:"1,4096"`
	Limit  int    `json:"limit,omitempty" jsonschema:"how many to list" range:"1,1000" default:"200"`
	Offset int    `json:"offset,omitempty" jsonschema:"how many to pass over" range:"0,100000"`
}

type fileListOut struct {
	Untrusted  bool       `json:"untrusted" jsonschema:"always true: names and targets come from inside the workspace"`
	Workspace  string     `json:"workspace"`
	Entries    []fileView `json:"entries"`
	NextOffset int        `json:"next_offset,omitempty" jsonschema:"the offset for the rest, if there is one"`
}

type fileView struct {
	Name       string    `json:"name"`
	Type       string    `json:"type"`
	SizeBytes  int64     `json:"size_bytes"`
	Mode       string    `json:"mode"`
	ModifiedAt time.Time `json:"modified_at"`
	Target     string    `json:"target,omitempty" jsonschema:"where a symbolic link points"`
}

func (r *registry) addFileTools() {
	add(r, tool{
		name: "file_read", title: "Read a file", kind: reads,
		about: "Read a file of a workspace, from an offset on.",
	}, r.readFile)
	add(r, tool{
		name: "file_write", title: "Write a file", kind: destroys, idempotent: true,
		about: "Write a file of a workspace: the whole content replaces what was there. Missing directories are made.",
	}, r.writeFile)
	add(r, tool{
		name: "file_list", title: "List a directory", kind: reads,
		about: "List a directory of a workspace.",
	}, r.listFiles)
}

func (r *registry) readFile(ctx context.Context, in fileReadIn) (fileReadOut, string, error) {
	var out fileReadOut
	id, err := r.workspaceID(ctx, in.Workspace)
	if err != nil {
		return out, "", err
	}
	body, info, err := r.client.OpenFile(ctx, id, in.Path)
	if err != nil {
		return out, "", err
	}
	defer body.Close()
	if in.Offset > info.Size {
		return out, "", invalid("the file has %d bytes; offset %d is after its end", info.Size, in.Offset)
	}
	if _, err := io.CopyN(io.Discard, body, in.Offset); err != nil {
		return out, "", fmt.Errorf("read up to offset %d: %w", in.Offset, err)
	}
	b, err := io.ReadAll(io.LimitReader(body, int64(in.MaxBytes)))
	if err != nil {
		return out, "", err
	}
	if in.Offset+int64(len(b)) < info.Size {
		b = wholeRunes(b)
	}
	end := in.Offset + int64(len(b))
	out = fileReadOut{guestBytes: newGuestBytes(b), Workspace: id, Path: in.Path, SizeBytes: info.Size, Mode: visible(clip(info.Mode, 8)), Offset: in.Offset}
	text := fmt.Sprintf("bytes %d to %d of %d, mode %s:\n%s\n", in.Offset, end, info.Size, out.Mode, quote(in.Path, string(b)))
	if end < info.Size {
		out.NextOffset = end
		text += fmt.Sprintf("There is more: file_read with offset %d.\n", end)
	}
	return out, text, nil
}

func (r *registry) writeFile(ctx context.Context, in fileWriteIn) (fileWriteOut, string, error) {
	content := []byte(in.Content)
	if in.Encoding == "base64" {
		var err error
		if content, err = base64.StdEncoding.DecodeString(in.Content); err != nil {
			return fileWriteOut{}, "", invalid("content is not base64: %v", err)
		}
	}
	id, err := r.workspaceID(ctx, in.Workspace)
	if err != nil {
		return fileWriteOut{}, "", err
	}
	if _, err := r.client.WriteFile(ctx, id, in.Path, strings.NewReader(string(content)), coppice.WriteOptions{Mode: in.Mode, Mkdirs: true}); err != nil {
		return fileWriteOut{}, "", err
	}
	out := fileWriteOut{Workspace: id, Path: in.Path, SizeBytes: int64(len(content))}
	return out, fmt.Sprintf("wrote %d bytes to %s in %s", out.SizeBytes, visible(in.Path), id), nil
}

// maxName bounds a name and a link's target in an answer, in bytes.
const maxName = 1024

func (r *registry) listFiles(ctx context.Context, in fileListIn) (fileListOut, string, error) {
	out := fileListOut{Untrusted: true, Entries: []fileView{}}
	id, err := r.workspaceID(ctx, in.Workspace)
	if err != nil {
		return out, "", err
	}
	list, err := r.client.ListFiles(ctx, id, in.Path)
	if err != nil {
		return out, "", err
	}
	out.Workspace = id
	from := min(in.Offset, len(list.Entries))
	to := min(from+in.Limit, len(list.Entries))
	var lines strings.Builder
	for _, e := range list.Entries[from:to] {
		v := fileView{Name: clip(e.Name, maxName), Type: string(e.Type), SizeBytes: e.Size, Mode: clip(e.Mode, 8), ModifiedAt: e.MTime, Target: clip(e.Target, maxName)}
		out.Entries = append(out.Entries, v)
		fmt.Fprintf(&lines, "%s %-9s %10d %s", visible(v.Mode), visible(v.Type), v.SizeBytes, visible(v.Name))
		if v.Target != "" {
			lines.WriteString(" -> " + visible(v.Target))
		}
		lines.WriteString("\n")
	}
	text := fmt.Sprintf("%d of %d entries, from %d on:\n%s\n", to-from, len(list.Entries), from, quote(in.Path, lines.String()))
	if to < len(list.Entries) {
		out.NextOffset = to
		text += fmt.Sprintf("There are more: file_list with offset %d.\n", to)
	} else if list.Truncated {
		text += "The directory has more entries than the workspace lists. Use exec with find.\n"
	}
	return out, text, nil
}
