package template

import (
	"context"
	"errors"
	"net/http"
	"path"
	"strconv"
	"strings"

	"github.com/coppice-dev/coppice/controller/compat/shared"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// The labels of images that are templates.
const (
	labelBuild = "e2b/build"    // the id of the build
	LabelName  = "e2b/template" // as the client named it
)

const (
	readySeconds = 300           // for a start command to become ready, as E2B has it
	stockImage   = "e2bdev/base" // what E2B's clients build from if the program names nothing
	userOfE2B    = "user"        // the account that all images of E2B have
)

// Step is one step of a build.
type Step struct {
	Type      string   `json:"type"`
	Args      []string `json:"args"`
	FilesHash string   `json:"filesHash"`
	Force     bool     `json:"force"`

	// The clients have done these themselves, and send them nevertheless.
	ForceUpload     *bool `json:"forceUpload"`
	ResolveSymlinks *bool `json:"resolveSymlinks"`
	Gzip            *bool `json:"gzip"`
}

func (s Step) arg(n int) string {
	if n < len(s.Args) {
		return s.Args[n]
	}
	return ""
}

// Build is what a template is built of, as E2B's clients send it.
type Build struct {
	FromImage         string `json:"fromImage"`
	FromTemplate      string `json:"fromTemplate"`
	FromImageRegistry any    `json:"fromImageRegistry"`
	Force             bool   `json:"force"`
	Steps             []Step `json:"steps"`
	StartCmd          string `json:"startCmd"`
	ReadyCmd          string `json:"readyCmd"`
}

// Options say how a build is translated.
type Options struct {
	User       string                                             // of the commands of a build, until a step names another
	OpenEgress bool                                               // the build reaches everything
	Snapshot   func(template string) (coppice.CheckpointID, bool) // the checkpoint that a template's id names
}

// Start begins a build. A repeat begins nothing.
func (b Build) Start(ctx context.Context, client *coppice.Client, template, build string, opts Options) error {
	cpus, memory, err := sizeOf(build)
	if err != nil {
		return err
	}
	if len(template) > MaxName {
		return shared.Failf(http.StatusBadRequest, "the template's id has more than %d characters", MaxName)
	}
	req, err := b.request(ctx, client, opts)
	if err != nil {
		return err
	}
	req.Name, req.Labels = ImageName(template), coppice.Labels{labelBuild: build, LabelName: template}
	if cpus > 0 {
		req.Resources.VCPUs = &cpus
	}
	if memory > 0 {
		req.Resources.MemoryMiB = &memory
	}
	if opts.OpenEgress {
		req.Network.EgressPolicy = coppice.EgressAllowAll
	}
	_, err = client.StartBuild(coppice.WithIdempotencyKey(ctx, claim(template, build)), req)
	if errors.Is(err, coppice.CodeIdempotencyInProgress) {
		return nil
	}
	return err
}

// claim is the idempotency key of a build.
func claim(template, build string) string { return "e2b-build-" + build + "-" + ImageName(template) }

// request translates a build.
func (b Build) request(ctx context.Context, client *coppice.Client, opts Options) (coppice.BuildImageRequest, error) {
	from, user, err := b.base(ctx, client, opts)
	req := coppice.BuildImageRequest{From: from, NoCache: b.Force}
	if err != nil {
		return req, err
	}
	if user == "" { // E2B's clients do not expect the image's own user
		user = opts.User
		req.Steps = append(req.Steps, coppice.BuildStep{User: user})
	}
	for i, s := range b.Steps {
		steps, err := s.translate(&user, opts.User)
		if err != nil {
			f := shared.Translate(err)
			return req, shared.Failf(f.Status, "steps.%d: %s", i, f.Message)
		}
		req.Steps = append(req.Steps, steps...)
		req.NoCache = req.NoCache || s.Force
	}
	switch {
	case b.StartCmd != "":
		req.Start = &coppice.BuildStart{Command: b.StartCmd, User: user}
		if b.ReadyCmd != "" {
			req.Start.Ready = &coppice.BuildReady{Command: b.ReadyCmd, TimeoutSeconds: readySeconds}
		}
	case b.ReadyCmd != "":
		return req, Unsupported("a ready command without a start command")
	}
	return req, nil
}

// base returns what a build begins with, and the user of its commands. The user is empty if it is not known.
func (b Build) base(ctx context.Context, client *coppice.Client, opts Options) (from, user string, err error) {
	from = b.FromImage
	switch {
	case b.FromImageRegistry != nil:
		return "", "", Unsupported("fromImageRegistry (pull the image first)")
	case (b.FromImage == "") == (b.FromTemplate == ""):
		return "", "", shared.Failf(http.StatusBadRequest, "exactly one of fromImage and fromTemplate must be given")
	case strings.TrimSuffix(b.FromImage, ":latest") == stockImage:
		return Base, "", nil
	case b.FromTemplate != "":
		if id, ok := opts.Snapshot(b.FromTemplate); ok {
			return id, "", nil
		}
		from = strings.TrimSuffix(b.FromTemplate, ":"+DefaultTag)
		if from != ImageName(from) {
			image, err := Find(ctx, client, from)
			return image.Name, userOf(image), err
		}
	}
	if !imageName.MatchString(from) { // a reference of a registry
		return from, "", nil
	}
	image, err := client.BuiltImage(ctx, from)
	if errors.Is(err, coppice.CodeImageNotFound) {
		return from, "", nil
	}
	return from, userOf(image), err
}

func userOf(image coppice.BuiltImage) string {
	if image.Config.User == "" {
		return Root
	}
	return image.Config.User
}

// translate translates a step. user is the present user of commands, and standIn replaces the name "user".
func (s Step) translate(user *string, standIn string) ([]coppice.BuildStep, error) {
	local := func(name string) string {
		if name == userOfE2B {
			return standIn
		}
		return name
	}
	bad := shared.Failf(http.StatusBadRequest, "%s has the wrong arguments", shared.Clip(s.Type))
	if s.arg(0) == "" {
		return nil, bad
	}
	switch s.Type {
	case "RUN":
		run := coppice.BuildStep{Run: s.arg(0)}
		if as := local(s.arg(1)); as != "" && as != *user {
			return []coppice.BuildStep{{User: as}, run, {User: *user}}, nil
		}
		return []coppice.BuildStep{run}, nil
	case "COPY":
		if !filesHash.MatchString(s.FilesHash) || s.arg(1) == "" {
			return nil, bad
		}
		owner := local(s.arg(2))
		if owner == "" {
			owner = *user
		}
		if owner == Root || owner == Root+":"+Root { // the default, for which the image needs no account
			owner = ""
		}
		from := path.Clean(s.arg(0))
		if from == "." {
			from = ""
		}
		return []coppice.BuildStep{{Copy: &coppice.BuildCopy{Upload: UploadID(s.FilesHash), Path: from, Dest: s.arg(1), User: owner, Mode: s.arg(3)}}}, nil
	case "ENV":
		if len(s.Args)%2 != 0 {
			return nil, bad
		}
		env := coppice.Env{}
		for n := 0; n < len(s.Args); n += 2 {
			env[s.Args[n]] = s.Args[n+1]
		}
		return []coppice.BuildStep{{Env: env}}, nil
	case "WORKDIR":
		return []coppice.BuildStep{{Workdir: s.arg(0)}}, nil
	case "USER":
		*user = local(s.arg(0))
		return []coppice.BuildStep{{User: *user}}, nil
	}
	return nil, Unsupported("a step " + strconv.Quote(shared.Clip(s.Type)))
}
