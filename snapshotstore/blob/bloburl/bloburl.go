// Package bloburl opens the store that a URL names:
//
//	dir:/absolute/path
//	s3://bucket/prefix?endpoint=https://host:port&region=name
//
// Without an endpoint, the bucket is on AWS, in the region. path_style=0 puts the bucket into the host name,
// path_style=1 puts it into the path, which is the default with an endpoint. ca=/file has additional roots for the
// server's certificate. insecure=1 allows http to other hosts than this one. Credentials are never in the URL.
package bloburl

import (
	"context"
	"errors"
	"io"
	"net"
	"net/url"
	"path"
	"path/filepath"
	"strings"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
	"github.com/coppice-dev/coppice/snapshotstore/blob/dir"
	"github.com/coppice-dev/coppice/snapshotstore/blob/s3"
)

// Location is a parsed URL.
type Location struct {
	Dir string     // a directory; empty: a bucket
	S3  *s3.Config // a bucket, without credentials
}

// Store is an open store. Close must be the last call.
type Store interface {
	blob.Blobs
	io.Closer
}

// Dial opens a store without checking that it exists. A directory needs no credentials.
func Dial(raw string, credentials s3.Credentials) (Store, error) {
	at, err := Parse(raw)
	if err != nil {
		return nil, err
	}
	return at.open(credentials)
}

// Open opens a store and checks that it can be used.
func Open(ctx context.Context, raw string, credentials s3.Credentials) (Store, error) {
	s, err := Dial(raw, credentials)
	if err != nil {
		return nil, err
	}
	if err := blob.Probe(ctx, s); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

func (l Location) open(credentials s3.Credentials) (Store, error) {
	if l.S3 == nil {
		return dir.Open(l.Dir)
	}
	cfg := *l.S3
	cfg.Credentials = credentials
	return s3.New(cfg)
}

// String describes the store for people.
func (l Location) String() string {
	if l.S3 == nil {
		return "directory " + l.Dir
	}
	return l.S3.String()
}

func refuse(format string, a ...any) error {
	return core.Errorf(core.Invalid, core.CodeInvalidField, format, a...)
}

// Parse reads a URL and opens nothing. Its errors quote only the wrong part of a URL, because the rest may contain
// secrets.
func Parse(raw string) (Location, error) {
	const forms = `dir:/absolute/path or s3://bucket/prefix?endpoint=https://host&region=name`
	u, err := url.Parse(raw)
	switch {
	case err != nil:
		return Location{}, refuse("the store's URL is malformed; it must be %s", forms)
	case u.User != nil:
		return Location{}, refuse("the store's URL holds credentials, which do not belong there: it is shown and logged")
	case u.Fragment != "" || strings.HasSuffix(raw, "#"):
		return Location{}, refuse("the store's URL has a fragment (#), which has no meaning there")
	case u.Scheme == "dir":
		return parseDir(u)
	case u.Scheme == "s3":
		return parseS3(u)
	default:
		return Location{}, refuse("the store's URL is of an unknown kind; it must be %s", forms)
	}
}

func parseDir(u *url.URL) (Location, error) {
	switch {
	case u.Host != "" || u.RawQuery != "" || u.ForceQuery:
		return Location{}, refuse("the store's URL may name only a directory: dir:/absolute/path")
	case u.Opaque != "" || !filepath.IsAbs(u.Path) || strings.ContainsRune(u.Path, 0) || filepath.Clean(u.Path) == "/":
		return Location{}, refuse("the store's directory must be an absolute path: dir:/absolute/path")
	}
	return Location{Dir: filepath.Clean(u.Path)}, nil
}

func parseS3(u *url.URL) (Location, error) {
	cfg := s3.Config{Bucket: u.Host, Prefix: strings.Trim(u.Path, "/")}
	if u.Opaque != "" || u.Path != "" && path.Clean(u.Path) != strings.TrimSuffix(u.Path, "/") && u.Path != "/" {
		return Location{}, refuse("the store's URL must be s3://bucket/prefix")
	}
	query, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return Location{}, refuse("the options of the store's URL are malformed")
	}
	var insecure bool
	style := ""
	for name, values := range query {
		if len(values) != 1 || values[0] == "" {
			return Location{}, refuse("the store's URL must give %s once, with a value", core.Clip(name))
		}
		value := values[0]
		switch name {
		case "endpoint":
			cfg.Endpoint = strings.TrimSuffix(value, "/")
		case "region":
			cfg.Region = value
		case "ca":
			cfg.CAFile = value
		case "path_style", "insecure":
			if value != "0" && value != "1" {
				return Location{}, refuse("%s in the store's URL must be 0 or 1", name)
			}
			if name == "insecure" {
				insecure = value == "1"
			} else {
				style = value
			}
		default:
			return Location{}, refuse("the option %q of the store's URL does not exist; the options are endpoint, region, path_style, ca and insecure", core.Clip(name))
		}
	}
	if cfg.Region != "" && !validRegion(cfg.Region) {
		return Location{}, refuse("the region in the store's URL is not a valid name of a region")
	}
	cfg.PathStyle = style == "1" || style == "" && cfg.Endpoint != ""
	if cfg.Endpoint == "" {
		if cfg.Region == "" {
			return Location{}, refuse("the store's URL names neither an endpoint nor a region; give endpoint=https://host, or region=name for a bucket on AWS")
		}
		cfg.Endpoint = "https://s3." + cfg.Region + ".amazonaws.com"
	}
	if err := cfg.Check(); err != nil {
		return Location{}, err
	}
	if cfg.CAFile != "" && !filepath.IsAbs(cfg.CAFile) {
		return Location{}, refuse("ca in the store's URL must be an absolute path")
	}
	if endpoint, err := url.Parse(cfg.Endpoint); err != nil || endpoint.Scheme != "https" && !insecure && !onLoopback(endpoint) {
		return Location{}, refuse("the store's endpoint uses http, so anyone on the network can read and change the stored objects; use https, or add insecure=1")
	}
	return Location{S3: &cfg}, nil
}

func validRegion(s string) bool {
	for _, c := range []byte(s) {
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' {
			return false
		}
	}
	return len(s) <= 64
}

func onLoopback(endpoint *url.URL) bool {
	ip := net.ParseIP(endpoint.Hostname())
	return endpoint.Hostname() == "localhost" || ip != nil && ip.IsLoopback()
}
