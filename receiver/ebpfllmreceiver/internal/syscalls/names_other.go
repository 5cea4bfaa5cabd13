//go:build !amd64 && !arm64

package syscalls

var names map[int32]string
