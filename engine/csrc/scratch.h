// Memory of one call, kept by the thread for the next: after the largest call nothing is allocated any more.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>
#include <vector>

namespace adapt {

class Scratch {
  public:
    // What was taken before is free again once the scope that was opened after it ends.
    class Scope {
      public:
        Scope() : scratch_(own()), outer_(scratch_.depth_++ > 0) {}
        ~Scope() {
            --scratch_.depth_;
            if (!outer_) scratch_.settle();
        }
        Scope(const Scope &) = delete;

        template <class T>
        T *take(std::size_t count) {
            return static_cast<T *>(scratch_.bytes(count * sizeof(T)));
        }

      private:
        Scratch &scratch_;
        bool outer_;
    };

  private:
    struct Block {
        char *data;
        std::size_t size;
    };
    static constexpr std::size_t line = 64;

    static Scratch &own() {
        static thread_local Scratch scratch;
        return scratch;
    }
    ~Scratch() {
        for (const Block &block : blocks_) std::free(block.data);
    }

    void *bytes(std::size_t size) {
        size = (size + line - 1) / line * line + line;  // a line apart: neighbours belong to different threads
        if (blocks_.empty() || used_ + size > blocks_.back().size) add(size);
        void *found = blocks_.back().data + used_;
        used_ += size;
        total_ += size;
        return found;
    }
    void add(std::size_t size) {
        size = (size + 4095) / 4096 * 4096;
        char *data = static_cast<char *>(std::aligned_alloc(line, size));
        if (data == nullptr) throw std::bad_alloc();
        blocks_.push_back({data, size});
        used_ = 0;
    }
    // One block that holds all that a call took.
    void settle() {
        if (blocks_.size() > 1) {
            for (const Block &block : blocks_) std::free(block.data);
            blocks_.clear();
            add(total_);
        }
        used_ = total_ = 0;
    }

    std::vector<Block> blocks_;
    std::size_t used_ = 0, total_ = 0;
    int depth_ = 0;
};

}  // namespace adapt
