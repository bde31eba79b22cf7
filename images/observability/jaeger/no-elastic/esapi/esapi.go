// Package esapi is what Jaeger names of Elastic's API; nothing of it is ever called.
package esapi

import "io"

// Indices has the one call that Jaeger makes.
type Indices struct {
	PutIndexTemplate func(name string, body io.Reader, options ...func()) (*Response, error)
}

// Response is its answer.
type Response struct{ StatusCode int }
