package scenarios

import "github.com/ebpfllm/ebpfllm/internal/truthlab/lab"

func host() []lab.Scenario { return nil }
