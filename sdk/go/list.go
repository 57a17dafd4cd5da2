package coppice

import (
	"context"
	"iter"
	"maps"
	"net/url"
	"strconv"
)

// page is the form in which every list answers.
type page[T any] struct {
	Items      []T    `json:"items"`
	NextCursor string `json:"next_cursor"`
}

// pageSize is the number of items that an iterator requests at once.
const pageSize = 500

// all iterates over every item of a list, page by page. An error ends it.
func all[T any](ctx context.Context, c *Client, r request) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		query := url.Values{}
		maps.Copy(query, r.query)
		query.Set("limit", strconv.Itoa(pageSize))
		for {
			var p page[T]
			if err := c.call(ctx, r.with(query), &p); err != nil {
				var zero T
				yield(zero, err)
				return
			}
			for _, item := range p.Items {
				if !yield(item, nil) {
					return
				}
			}
			if p.NextCursor == "" {
				return
			}
			query.Set("cursor", p.NextCursor)
		}
	}
}

// Collect returns the items of an iterator of this package, up to its first error.
func Collect[T any](seq iter.Seq2[T, error]) ([]T, error) {
	out := []T{}
	for item, err := range seq {
		if err != nil {
			return nil, err
		}
		out = append(out, item)
	}
	return out, nil
}

func set(query url.Values, key, value string) {
	if value != "" {
		query.Set(key, value)
	}
}
