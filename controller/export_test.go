package controller

import "context"

// Fence is a round of the loop that gives up silent runners.
func (c *Controller) Fence(ctx context.Context) error { return c.fence(ctx) }

// Retain applies the stored policies that are due.
func (c *Controller) Retain(ctx context.Context) error { return c.RunDue(ctx) }
