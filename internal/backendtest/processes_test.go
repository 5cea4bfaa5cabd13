//go:build backends

package backendtest

import (
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// start runs a program until the test ends, then asks it to stop and waits. Its
// output is shown if the test failed.
func start(t *testing.T, name, program string, env []string, args ...string) {
	t.Helper()
	output, err := os.Create(filepath.Join(t.TempDir(), name+".log"))
	require.NoError(t, err)
	cmd := exec.Command(program, args...)
	cmd.Stdout, cmd.Stderr = output, output
	cmd.Env = append(os.Environ(), env...)
	// Nothing may outlive a test that was killed.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	require.NoError(t, cmd.Start())
	exited := make(chan error, 1)
	go func() { exited <- cmd.Wait() }()

	t.Cleanup(func() {
		defer output.Close()
		_ = cmd.Process.Signal(syscall.SIGTERM)
		select {
		case err := <-exited:
			assert.NoError(t, err, "%s did not end well", name)
		case <-time.After(20 * time.Second):
			_ = cmd.Process.Kill()
			assert.Fail(t, name+" did not stop on SIGTERM within 20 s")
		}
		if t.Failed() {
			text, _ := os.ReadFile(output.Name())
			if len(text) > 20_000 {
				text = text[len(text)-20_000:]
			}
			t.Logf("%s said:\n%s", name, text)
		}
	})
}

// waitFor waits until an address answers 200.
func waitFor(t *testing.T, what, address string) {
	t.Helper()
	require.Eventually(t, func() bool {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, address, http.NoBody)
		if err != nil {
			return false
		}
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			return false
		}
		response.Body.Close()
		return response.StatusCode == http.StatusOK
	}, time.Minute, 100*time.Millisecond, "%s answers on %s", what, address)
}

// freeAddr returns an address on loopback that nobody listens on.
func freeAddr(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer listener.Close()
	return listener.Addr().String()
}

// backend returns the path of a back end that `make test-backends` built.
func backend(t *testing.T, name string) string {
	t.Helper()
	dir := os.Getenv("EBPFLLM_BACKENDS")
	require.NotEmpty(t, dir, "EBPFLLM_BACKENDS names no folder; run 'make test-backends'")
	path := filepath.Join(dir, name)
	require.FileExists(t, path, "run 'make test-backends', which builds it")
	return path
}

func collector(t *testing.T) string {
	t.Helper()
	path := os.Getenv("EBPFLLM_COLLECTOR")
	require.NotEmpty(t, path, "EBPFLLM_COLLECTOR names no file; run 'make test-backends'")
	require.FileExists(t, path, "run 'make build'")
	return path
}

func buildServer(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "llmserver")
	out, err := exec.Command("go", "build", "-o", path, "../../examples/llmserver").CombinedOutput()
	require.NoError(t, err, string(out))
	return path
}
