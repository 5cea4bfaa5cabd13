// Package llamacpp builds examples/llamacpp, the server on the real llama.cpp, for
// the load test and the truth lab, and fetches llama.cpp's binding for Node.
package llamacpp

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// Server is the built server.
type Server struct {
	Path  string   // of the program
	Args  []string // name the libraries and the model
	Model string   // the file of weights, which it maps
}

// ErrNoNPM is returned where the libraries cannot be fetched.
var ErrNoNPM = errors.New("needs npm, which serves llama.cpp's libraries: apt-get install npm")

const libraries, binding, version = "@node-llama-cpp/linux-x64", "node-llama-cpp", "3.21.1"

// Binding fetches node-llama-cpp, which works on the same libraries, and returns the
// file that a program of Node imports.
func Binding(ctx context.Context) (module string, err error) {
	dir, err := install(ctx, libraries, binding)
	return filepath.Join(dir, "node_modules", binding, "dist", "index.js"), err
}

// install fetches those of the npm packages that are not there, and returns where
// they all are.
func install(ctx context.Context, packages ...string) (dir string, err error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	dir = filepath.Join(cache, "ebpfllm", "llamacpp")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	// Without the optional dependencies, which are GPU libraries of 700 MB.
	arguments := []string{"install", "--prefix", dir, "--save-exact", "--ignore-scripts", "--omit=optional", "--no-audit", "--no-fund"}
	missing := false
	for _, p := range packages {
		if _, err := os.Stat(filepath.Join(dir, "node_modules", p, "dist")); err != nil {
			missing = true
		}
		arguments = append(arguments, p+"@"+version)
	}
	if !missing {
		return dir, nil
	}
	if _, err := exec.LookPath("npm"); err != nil {
		return "", ErrNoNPM
	}
	return dir, command(ctx, "npm", arguments...)
}

// Build fetches llama.cpp's libraries from npm, builds the server and has it write
// a model, all in the user's cache directory: they are large and stay the same.
func Build(ctx context.Context) (Server, error) {
	dir, err := install(ctx, libraries)
	if err != nil {
		return Server{}, err
	}
	lib := filepath.Join(dir, "node_modules", libraries, "bins", "linux-x64")
	for _, name := range []string{"libllama", "libggml"} {
		err := os.Symlink(name+".v0.4.0.so", filepath.Join(lib, name+".so"))
		if err != nil && !errors.Is(err, os.ErrExist) {
			return Server{}, err
		}
	}
	root, err := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}", "github.com/ebpfllm/ebpfllm").Output()
	if err != nil {
		return Server{}, fmt.Errorf("find the module: %w", err)
	}
	s := Server{Path: filepath.Join(dir, "llamacpp"), Model: filepath.Join(dir, "random.gguf")}
	s.Args = []string{"-libraries", lib, "-model", s.Model}
	err = command(ctx, "go", "build", "-C", filepath.Join(strings.TrimSpace(string(root)), "examples", "llamacpp"), "-o", s.Path, ".")
	if err != nil {
		return Server{}, err
	}
	return s, command(ctx, s.Path, "-generate", "-model", s.Model)
}

// command runs a command to its end; its output is part of the error.
func command(ctx context.Context, name string, args ...string) error {
	if output, err := exec.CommandContext(ctx, name, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, output)
	}
	return nil
}
