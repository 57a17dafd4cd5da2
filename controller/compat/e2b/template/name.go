package template

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"net/http"
	"regexp"
	"strconv"
	"strings"

	"github.com/google/uuid"

	"github.com/coppice-dev/coppice/controller/compat/shared"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// Bounds of what a client asks for.
const (
	MaxName   = 128       // characters of a template's name
	maxMemory = 1<<24 - 1 // MiB; the id of a build has no room for more
)

var (
	templateName = regexp.MustCompile(`^[A-Za-z0-9_.-]+$`)
	imageName    = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)
)

// ImageName is the name of the project's image that holds a template. If no image can have the template's name, a digest of it is the name.
func ImageName(template string) string {
	template = strings.TrimSuffix(template, ":"+DefaultTag)
	if imageName.MatchString(template) {
		return template
	}
	sum := sha256.Sum256([]byte(template))
	const digits = 20
	return "e2b-" + hex.EncodeToString(sum[:digits])
}

// Find finds the image of a template.
func Find(ctx context.Context, client *coppice.Client, template string) (coppice.BuiltImage, error) {
	image, err := client.BuiltImage(ctx, ImageName(template))
	if errors.Is(err, coppice.CodeImageNotFound) {
		return image, shared.Failf(http.StatusNotFound, "template %q was not found", shared.Clip(template))
	}
	return image, err
}

// New is a request for the ids of a build, as E2B's clients send it.
type New struct {
	Name          string   `json:"name"`
	Alias         string   `json:"alias"` // of earlier versions
	Tags          []string `json:"tags"`
	TeamID        string   `json:"teamID"`
	CPUCount      uint8    `json:"cpuCount"`
	MemoryMB      uint32   `json:"memoryMB"`
	MinFreeDiskMB uint32   `json:"minFreeDiskMb"`
}

// Named are the ids of a build.
type Named struct {
	TemplateID string   `json:"templateID"`
	BuildID    string   `json:"buildID"`
	Public     bool     `json:"public"`
	Names      []string `json:"names"`
	Aliases    []string `json:"aliases"`
	Tags       []string `json:"tags"`
}

// IDs makes the ids of a build.
func (q New) IDs() (Named, error) {
	if q.Name == "" {
		q.Name = q.Alias
	}
	name, tag, tagged := strings.Cut(q.Name, ":")
	if tagged {
		q.Tags = append(q.Tags, tag)
	}
	for _, t := range q.Tags {
		if t != DefaultTag {
			return Named{}, Unsupported("a tag other than " + strconv.Quote(DefaultTag))
		}
	}
	switch {
	case len(name) > MaxName || !templateName.MatchString(name):
		return Named{}, shared.Failf(http.StatusBadRequest, "name: a template's name has 1 to %d letters, digits, hyphens, underscores and dots", MaxName)
	case q.MemoryMB > maxMemory:
		return Named{}, shared.Failf(http.StatusBadRequest, "memoryMB: at most %d", maxMemory)
	case q.MinFreeDiskMB > 0:
		return Named{}, Unsupported("minFreeDiskMb")
	}
	return Named{TemplateID: name, BuildID: newBuildID(q.CPUCount, q.MemoryMB), Names: []string{name}, Aliases: []string{name}, Tags: []string{DefaultTag}}, nil
}

// newBuildID makes a UUID that holds the machine's size: E2B's clients send the size before they send the steps.
func newBuildID(cpus uint8, memory uint32) string {
	id := uuid.New()
	binary.BigEndian.PutUint32(id[:], uint32(cpus)<<24|memory)
	id[6] = id[6]&0x0f | 0x80 // version 8 of RFC 9562, for formats of one's own
	return id.String()
}

// sizeOf reads a build's id. A number is zero if the client has not said it.
func sizeOf(build string) (cpus, memory int, err error) {
	id, err := uuid.Parse(build)
	if err != nil || id.String() != build || id.Version() != 8 {
		return 0, 0, shared.Failf(http.StatusNotFound, "build %q was not found", shared.Clip(build))
	}
	size := binary.BigEndian.Uint32(id[:])
	return int(size >> 24), int(size & maxMemory), nil
}
