package coppice

import (
	"context"
	"iter"
	"net/http"
)

// Self returns the key that the client uses.
func (c *Client) Self(ctx context.Context) (APIKey, error) {
	var out APIKey
	err := c.call(ctx, get("v1", "self"), &out)
	return out, err
}

// CreateProject makes a project. It needs an admin's key.
func (c *Client) CreateProject(ctx context.Context, req CreateProjectRequest) (Project, error) {
	var out Project
	err := c.call(ctx, creation("v1", "projects").json(req), &out)
	return out, err
}

// Project returns a project with its usage of its quotas.
func (c *Client) Project(ctx context.Context, id ProjectID) (Project, error) {
	var out Project
	err := c.call(ctx, get("v1", "projects", id), &out)
	return out, err
}

// Projects iterates over the projects that the key may see, newest first.
func (c *Client) Projects(ctx context.Context) iter.Seq2[Project, error] {
	return all[Project](ctx, c, get("v1", "projects"))
}

// PatchProject changes quotas and returns the changed project.
func (c *Client) PatchProject(ctx context.Context, id ProjectID, req PatchProjectRequest) (Project, error) {
	var out Project
	err := c.call(ctx, request{method: http.MethodPatch, path: []string{"v1", "projects", id}, body: req}, &out)
	return out, err
}

// DeleteProject deletes an empty project and revokes its keys.
func (c *Client) DeleteProject(ctx context.Context, id ProjectID) error {
	return c.call(ctx, request{method: http.MethodDelete, path: []string{"v1", "projects", id}}, nil)
}

// CreateKey makes an API key. Only this answer contains its secret.
func (c *Client) CreateKey(ctx context.Context, project ProjectID, req CreateKeyRequest) (CreatedKey, error) {
	var out CreatedKey
	err := c.call(ctx, creation("v1", "projects", project, "keys").json(req), &out)
	return out, err
}

// Key returns an API key, without its secret.
func (c *Client) Key(ctx context.Context, id KeyID) (APIKey, error) {
	var out APIKey
	err := c.call(ctx, get("v1", "keys", id), &out)
	return out, err
}

// Keys iterates over the API keys of a project, newest first, including revoked and expired keys.
func (c *Client) Keys(ctx context.Context, project ProjectID) iter.Seq2[APIKey, error] {
	return all[APIKey](ctx, c, get("v1", "projects", project, "keys"))
}

// RevokeKey revokes an API key and the keys that were made with it. Idempotent.
func (c *Client) RevokeKey(ctx context.Context, id KeyID) error {
	return c.call(ctx, request{method: http.MethodDelete, path: []string{"v1", "keys", id}}, nil)
}
