package mcp

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

type grantListOut struct {
	Grants []grantView `json:"grants"`
}

// grantView is a grant in an answer. It has no field for the secret, nor for where the secret is.
type grantView struct {
	ID                string            `json:"id"`
	Provider          string            `json:"provider,omitempty"`
	Mode              string            `json:"mode"`
	AllowedHosts      []string          `json:"allowed_hosts"`
	Methods           []string          `json:"methods" jsonschema:"all if empty"`
	Paths             []string          `json:"paths" jsonschema:"all if empty"`
	Header            string            `json:"header" jsonschema:"the header that the secret is put into"`
	Placeholder       string            `json:"placeholder" jsonschema:"what programs send in place of the secret; worth nothing anywhere else"`
	Env               map[string]string `json:"env" jsonschema:"environment variables of newly started programs that have the placeholder"`
	RequestsPerMinute int               `json:"requests_per_minute,omitempty"`
	ExpiresAt         *time.Time        `json:"expires_at,omitempty"`
	Expired           bool              `json:"expired"`
	Pending           bool              `json:"pending" jsonschema:"it may not be in force yet"`
}

func (r *registry) addGrantTools() {
	add(r, tool{
		name: "grant_list", title: "List the secrets that a workspace may use", kind: reads,
		about: "List the grants of a workspace: which secret it may use with which hosts. Nobody sees the secret: programs send the placeholder, which is in their environment, and the proxy puts the secret into the request. A person gives grants with `coppice grant put`.",
	}, r.listGrants)
}

func (r *registry) listGrants(ctx context.Context, in workspaceRef) (grantListOut, string, error) {
	out := grantListOut{Grants: []grantView{}}
	id, err := r.workspaceID(ctx, in.Workspace)
	if err != nil {
		return out, "", err
	}
	grants, err := r.client.Grants(ctx, id)
	if err != nil {
		return out, "", err
	}
	var b strings.Builder
	for _, g := range grants {
		v := grantView{
			ID: g.ID, Provider: g.Provider, Mode: string(g.Mode), AllowedHosts: append([]string{}, g.AllowedHosts...), Methods: append([]string{}, g.Methods...),
			Paths: append([]string{}, g.Paths...), Header: g.Header, Placeholder: g.Placeholder, Env: map[string]string{}, RequestsPerMinute: g.RequestsPerMinute,
			Expired: g.Expired, Pending: g.Pending,
		}
		maps.Copy(v.Env, g.Env)
		if !g.ExpiresAt.IsZero() {
			v.ExpiresAt = &g.ExpiresAt
		}
		out.Grants = append(out.Grants, v)
		names := strings.Join(slices.Sorted(maps.Keys(v.Env)), " ")
		fmt.Fprintf(&b, "%s: for %s, in the variables %s", visible(v.ID), visible(strings.Join(v.AllowedHosts, " ")), visible(names))
		if v.Expired {
			b.WriteString(", expired")
		}
		b.WriteString("\n")
	}
	if len(grants) == 0 {
		b.WriteString("The workspace has no grants. A person gives one with `coppice grant put`.\n")
	}
	return out, b.String(), nil
}
