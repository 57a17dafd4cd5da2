package controller

import "context"

// Retain applies the stored policies that are due.
func (c *Controller) Retain(ctx context.Context) error { return c.RunDue(ctx) }
