// Package imageapi serves the routes of builds, of the images that projects have built, and of uploads.
package imageapi

import (
	"context"
	"errors"
	"net/http"
	"os"
	"strconv"
	"time"

	"github.com/labstack/echo/v4"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/builds"
	"github.com/coppice-dev/coppice/controller/httpapi/slow"
	"github.com/coppice-dev/coppice/controller/httpapi/stepjson"
	"github.com/coppice-dev/coppice/controller/httpapi/strictjson"
	"github.com/coppice-dev/coppice/controller/uploads"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/policy"
)

// Routes are the routes. Their fields are what the other routes have, too.
type Routes struct {
	Control   *controller.Controller
	Project   func(ctx context.Context) core.ProjectID
	Wait      func(w *api.Wait) time.Duration
	Operation func(a controller.Answer) (api.Operation, error)
	Labels    func(l api.Labels) (map[string]string, error)
	Env       func(field string, env api.Env) (map[string]string, error)
	Allow     func(list *api.Allow) (*[]string, error)
	Resources func(r api.ResourcesRequest) core.Resources
}

// BuildImage serves POST /v1/images.
func (s Routes) BuildImage(ctx context.Context, r api.BuildImageRequestObject) (api.BuildImageResponseObject, error) {
	spec, err := s.specIn(*r.Body)
	if err != nil {
		return nil, err
	}
	a, err := s.Control.BuildImage(ctx, s.Project(ctx), spec, s.Wait(r.Params.Wait))
	if err != nil {
		return nil, err
	}
	if a.Done {
		return api.BuildImage200JSONResponse(*ResultOf(a)), nil
	}
	op, err := s.Operation(a)
	return api.BuildImage202JSONResponse{AcceptedJSONResponse: api.AcceptedJSONResponse(op)}, err
}

func (s Routes) specIn(b api.BuildImageRequest) (builds.Spec, error) {
	out := builds.Spec{
		Name: b.Name, From: b.From, Dockerfile: b.Dockerfile, Context: b.Context, Args: b.BuildArgs, Target: b.Target, NoCache: b.NoCache,
		Resources: s.Resources(b.Resources), Egress: core.EgressPolicy(b.Network.EgressPolicy),
	}
	var err error
	if out.Labels, err = s.Labels(b.Labels); err != nil {
		return out, err
	}
	allow, err := s.Allow(b.Network.Allow)
	if err != nil {
		return out, err
	}
	if allow != nil {
		out.Allow = *allow
	}
	if out.Egress == "" {
		out.Egress = core.EgressDenyAll
		if allow == nil { // a build fetches packages
			for _, name := range policy.Bundles() {
				out.Allow = append(out.Allow, "bundle:"+name)
			}
		}
	}
	for _, step := range b.Steps {
		one := builds.Step{Run: step.Run, Workdir: step.Workdir, User: step.User}
		if one.Env, err = s.Env("steps.env", step.Env); err != nil {
			return out, err
		}
		if c := step.Copy; c != nil {
			one.Copy = &builds.CopyStep{Upload: c.Upload, Path: c.Path, Dest: c.Dest, User: c.User, Mode: c.Mode}
		}
		out.Steps = append(out.Steps, one)
	}
	if st := b.Start; st != nil {
		out.Start = &builds.Start{Command: st.Command, User: st.User}
		if out.Start.Env, err = s.Env("start.env", st.Env); err != nil {
			return out, err
		}
		if r := st.Ready; r != nil {
			out.Start.Ready = &builds.Ready{Command: r.Command, Port: r.Port, Seconds: r.TimeoutSeconds}
		}
	}
	return out, nil
}

// ResultOf is the answer to a build.
func ResultOf(a controller.Answer) *api.BuildResult {
	return &api.BuildResult{OperationID: string(a.Operation.ID), Image: ImageOf(*a.Result.Image), Timings: stepjson.TimingsOf(a.Operation.Timings)}
}

// ImageOf is an image of a project.
func ImageOf(i builds.Image) api.BuiltImage {
	out := api.BuiltImage{
		Name: i.Name, CheckpointID: string(i.Checkpoint), From: i.From, Labels: i.Labels, CreatedAt: i.CreatedAt,
		Build: api.ImageBuild{OperationID: string(i.Operation), Steps: i.Steps, CachedSteps: i.Cached},
		Config: api.ImageConfig{
			Env: i.Config.Env, Workdir: i.Config.Workdir, User: i.Config.User, Entrypoint: i.Config.Entrypoint, Cmd: i.Config.Cmd,
			ExposedPorts: i.Config.ExposedPorts, Labels: i.Config.Labels,
		},
	}
	if out.Config.Env == nil {
		out.Config.Env = map[string]string{}
	}
	return out
}

// Built lists the images of a project.
func (s Routes) Built(ctx context.Context) ([]api.BuiltImage, error) {
	list, err := s.Control.Builds.Images(ctx, s.Project(ctx))
	out := make([]api.BuiltImage, len(list))
	for i, image := range list {
		out[i] = ImageOf(image)
	}
	return out, err
}

// GetImage serves GET /v1/images/{name}.
func (s Routes) GetImage(ctx context.Context, r api.GetImageRequestObject) (api.GetImageResponseObject, error) {
	image, err := s.Control.Builds.Image(ctx, s.Project(ctx), r.ImageName)
	if err != nil {
		return nil, err
	}
	return api.GetImage200JSONResponse(ImageOf(image)), nil
}

// DeleteImage serves DELETE /v1/images/{name}.
func (s Routes) DeleteImage(ctx context.Context, r api.DeleteImageRequestObject) (api.DeleteImageResponseObject, error) {
	return api.DeleteImage204Response{}, s.Control.Builds.Delete(ctx, s.Project(ctx), r.ImageName)
}

// GetUpload serves GET /v1/uploads/{id}.
func (s Routes) GetUpload(ctx context.Context, r api.GetUploadRequestObject) (api.GetUploadResponseObject, error) {
	u, err := s.Control.Uploads.Get(ctx, s.Project(ctx), r.UploadID)
	if err != nil {
		return nil, err
	}
	return api.GetUpload200JSONResponse(uploadOf(u)), nil
}

// DeleteUpload serves DELETE /v1/uploads/{id}.
func (s Routes) DeleteUpload(ctx context.Context, r api.DeleteUploadRequestObject) (api.DeleteUploadResponseObject, error) {
	return api.DeleteUpload204Response{}, s.Control.Uploads.Delete(ctx, s.Project(ctx), r.UploadID)
}

func uploadOf(u uploads.Upload) api.Upload {
	return api.Upload{ID: u.ID, SizeBytes: u.Size, SHA256: u.SHA256, CreatedAt: u.CreatedAt, ExpiresAt: u.ExpiresAt}
}

// PutUpload serves PUT /v1/uploads/{id}.
func (s Routes) PutUpload(c echo.Context) error {
	req := c.Request()
	if req.ContentLength > uploads.MaxBytes {
		return uploads.ErrTooLarge
	}
	body, done := slow.Reader(c)
	u, err := s.Control.Uploads.Put(req.Context(), s.Project(req.Context()), c.Param("upload_id"), body)
	if _, ours := errors.AsType[*core.Error](err); ours {
		return err
	}
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return strictjson.Malformed("it did not come in time")
	case err != nil:
		return strictjson.Malformed("it ended too early")
	}
	done()
	return c.JSON(http.StatusOK, uploadOf(u)) //nolint:wrapcheck // the framework's own
}

// GetLog serves GET /v1/operations/{id}/log.
func (s Routes) GetLog(c echo.Context) error {
	ctx, id := c.Request().Context(), core.OperationID(c.Param("operation_id"))
	offset := int64(0)
	if text := c.QueryParam("offset"); text != "" {
		offset, _ = strconv.ParseInt(text, 10, 64) // the contract's middleware has checked it
	}
	if _, err := s.Control.Operation(ctx, s.Project(ctx), id, 0); err != nil {
		if _, failed := errors.AsType[*controller.OperationError](err); !failed {
			return err
		}
	}
	part, err := s.Control.Builds.Log(ctx, s.Project(ctx), id, offset)
	if err != nil {
		return err
	}
	h := c.Response().Header()
	h.Set("Coppice-Offset", strconv.FormatInt(part.Next-int64(len(part.Data)), 10))
	h.Set("Coppice-End-Offset", strconv.FormatInt(part.Next, 10))
	return c.Blob(http.StatusOK, "text/plain; charset=utf-8", part.Data) //nolint:wrapcheck // the framework's own
}
